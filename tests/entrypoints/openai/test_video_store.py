"""Jobs on disk: what is kept, what makes room, and who may have the folder."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.videos.files import TABLE_NAME, Variant, data_folder
from vllm_omni.entrypoints.openai.videos.record import VideoRecord, VideoStatus, new_video_id
from vllm_omni.entrypoints.openai.videos.store import VideoStore
from vllm_omni.errors import ConfigError
from vllm_omni.outputs.media import Frames


def record(video_id: str | None = None) -> VideoRecord:
    return VideoRecord(
        id=video_id or new_video_id(),
        created_at=1,
        status=VideoStatus.QUEUED,
        model="m",
        prompt="p",
        size="16x16",
        seconds="1",
    )


def frames(height: int = 16, width: int = 16) -> Frames:
    import numpy as np

    return Frames.of(np.zeros((3, height, width, 3), np.uint8), 8.0)


async def make(store: VideoStore, made: VideoRecord) -> None:
    await store.create(made)
    store.files.write(made.id, frames())
    await store.complete(made)


async def ids(store: VideoStore) -> list[str]:
    page = await store.page(None, 100, newest_first=False)
    assert page is not None
    return [one.id for one in page]


async def test_the_oldest_that_have_ended_make_room(tmp_path: Path) -> None:
    store = VideoStore(tmp_path, ServerLimits(max_stored_videos=3))
    running, *ended = [record() for _ in range(4)]
    await store.create(running)
    for one in ended:
        await make(store, one)

    assert await ids(store) == [running.id, ended[1].id, ended[2].id]
    assert not store.files.path(ended[0].id, Variant.VIDEO).exists()
    store.close()


async def test_bytes_make_room_too(tmp_path: Path) -> None:
    store = VideoStore(tmp_path, ServerLimits())
    await make(store, record())
    (first,) = await store.page(None, 1, newest_first=True) or []
    store.close()
    store = VideoStore(tmp_path, ServerLimits(max_stored_video_bytes=first.size_bytes + 1))
    second = record()
    await make(store, second)

    assert await ids(store) == [second.id]
    store.close()


def test_a_killed_server_leaves_a_job_that_has_failed(tmp_path: Path) -> None:
    script = """
        import asyncio, os, signal, sys
        from pathlib import Path
        from tests.entrypoints.openai.test_video_store import frames, record
        from vllm_omni.config.deploy import ServerLimits
        from vllm_omni.entrypoints.openai.videos.store import VideoStore
        store = VideoStore(Path(sys.argv[1]), ServerLimits())
        made = record(sys.argv[2])
        asyncio.run(store.create(made))
        asyncio.run(store.start(made.id))
        store.files.write(made.id, frames())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    made = record()
    words = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), made.id]
    subprocess.run(words, check=False, cwd=Path(__file__).parents[3], timeout=50)

    store = VideoStore(tmp_path, ServerLimits())
    found = asyncio.run(store.get(made.id))
    store.close()

    assert found is not None
    assert (found.status, found.error_code) == (VideoStatus.FAILED, "server_stopped")
    assert "create it again" in (found.error_message or "")
    assert list((tmp_path / "videos").iterdir()) == []


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    store = VideoStore(tmp_path, ServerLimits())

    with pytest.raises(ConfigError, match="in use by another server; give --data-dir"):
        VideoStore(tmp_path, ServerLimits())

    store.close()
    VideoStore(tmp_path, ServerLimits()).close()


@pytest.mark.parametrize("content", [b"no database" * 100, b""])
def test_a_table_that_is_none_stops_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TABLE_NAME).write_bytes(content)
    if content:
        with pytest.raises(ConfigError, match="cannot be used"):
            VideoStore(tmp_path, ServerLimits())
        (tmp_path / TABLE_NAME).unlink()

    VideoStore(tmp_path, ServerLimits()).close()


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="give --data-dir"):
        VideoStore(tmp_path / "file" / "x", ServerLimits())


def test_where_a_server_keeps_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    args = Namespace(port=8091, uds=None)

    assert data_folder(args, None) == tmp_path / "vllm_omni" / "port-8091"
    assert data_folder(args, "/data") == Path("/data")
    assert data_folder(Namespace(port=8091, uds="/run/a"), None).name.startswith("uds-")
    monkeypatch.setenv("VLLM_OMNI_DATA_DIR", str(tmp_path / "x"))
    assert data_folder(args, None) == tmp_path / "x"


def test_odd_sizes_are_written(tmp_path: Path) -> None:
    import av

    from vllm_omni.outputs.video_file import write_mp4

    write_mp4(frames(17, 31), tmp_path / "a.mp4")

    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (32, 18, 3)
