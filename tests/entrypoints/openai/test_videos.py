"""/v1/videos: jobs, their files and their end, over a fake replica."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image

from tests.entrypoints.openai.http_rig import TextParts
from tests.entrypoints.openai.picture_rig import (
    SIZE,
    VIDEOS,
    PictureRig,
    data_url,
    paints,
    picture_server,
    png,
)
from tests.fakes import eventually, failure_output, settle
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Task
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.entrypoints.openai.media import image_loader
from vllm_omni.outputs.media import StepProgress


@pytest.fixture
async def rig(text_parts: TextParts, tmp_path: Path) -> AsyncIterator[PictureRig]:
    async with picture_server(text_parts.args, task=Task.VIDEO, data_dir=tmp_path) as rig:
        yield rig


def half_done(request: StageRequest) -> Iterable[StageOutput]:
    """A replica that takes half of its steps and then waits."""
    yield StageOutput(request.request_id, progress=StepProgress(2, 4))


async def create(rig: PictureRig, **fields: object) -> dict[str, Any]:
    response = await rig.http.post("/v1/videos", json={"prompt": "a sea", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def get(rig: PictureRig, video_id: str) -> dict[str, Any]:
    return dict((await rig.http.get(f"/v1/videos/{video_id}")).json())


async def until(rig: PictureRig, video_id: str, status: str) -> dict[str, Any]:
    end_s = time.monotonic() + 20
    while (video := await get(rig, video_id))["status"] != status:
        assert time.monotonic() < end_s, video
        await settle()
    return video


async def test_a_job_ends_in_a_playable_file(rig: PictureRig) -> None:
    made = await create(rig, seconds="1", seed=4)

    video = await until(rig, made["id"], "completed")
    content = await rig.http.get(f"/v1/videos/{made['id']}/content")

    assert made["status"] == "queued"
    assert (video["progress"], video["size"], video["seconds"]) == (100, f"{SIZE}x{SIZE}", "1")
    assert video["expires_at"] - video["completed_at"] == 86400
    assert content.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(content.content)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == 8
    assert len(frames) == 9
    assert frames[0].shape == (SIZE, SIZE, 3)


async def test_a_length_becomes_a_number_of_frames_that_the_model_takes(rig: PictureRig) -> None:
    await create(rig, seconds="2", fps=8)

    assert rig.replica.added or await eventually(lambda: bool(rig.replica.added)) is None
    assert rig.requested.num_frames == 17


async def test_small_pictures_of_a_video(rig: PictureRig) -> None:
    made = await create(rig)
    await until(rig, made["id"], "completed")
    url = f"/v1/videos/{made['id']}/content"

    thumbnail = await rig.http.get(url, params={"variant": "thumbnail"})
    sheet = await rig.http.get(url, params={"variant": "spritesheet"})
    unknown = await rig.http.get(url, params={"variant": "raw"})

    assert Image.open(io.BytesIO(thumbnail.content)).format == "WEBP"
    assert Image.open(io.BytesIO(sheet.content)).size == (5 * SIZE, 2 * SIZE)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "variant")


async def test_a_video_starts_from_an_uploaded_picture(rig: PictureRig) -> None:
    picture = png(24, 16, color=(7, 8, 9))
    form = {"prompt": "waves", "seconds": "1", "seed": "3", "size": "64x32"}

    response = await rig.http.post(
        "/v1/videos", data=form, files={"input_reference": ("a.png", picture, "image/png")}
    )
    await until(rig, response.json()["id"], "completed")

    assert rig.requested.images[0].shape == (16, 24, 3)
    assert (rig.requested.width, rig.requested.seed) == (64, 3)


@pytest.mark.parametrize("as_form", [True, False])
async def test_a_video_starts_from_a_data_url(rig: PictureRig, as_form: bool) -> None:
    url = data_url(png(24, 16))
    if as_form:
        # As the official client sends an object in a form.
        parts = {"prompt": (None, "waves"), "input_reference[image_url]": (None, url)}
        response = await rig.http.post("/v1/videos", files=parts)
    else:
        response = await rig.http.post(
            "/v1/videos", json={"prompt": "waves", "input_reference": {"image_url": url}}
        )

    await until(rig, response.json()["id"], "completed")
    assert rig.requested.images[0].shape == (16, 24, 3)


async def test_progress_is_told_while_it_runs(rig: PictureRig) -> None:
    rig.replica.script = half_done
    made = await create(rig)

    video = await until(rig, made["id"], "in_progress")
    answer = await rig.http.get(f"/v1/videos/{made['id']}")
    content = await rig.http.get(f"/v1/videos/{made['id']}/content")

    assert video["progress"] == 50
    assert 200 <= int(answer.headers["openai-poll-after-ms"]) <= 5000
    assert content.status_code == 404
    assert content.json()["error"]["code"] == "video_not_ready"


async def test_pages_of_jobs(rig: PictureRig) -> None:
    ids = [(await create(rig))["id"] for _ in range(3)]

    newest = (await rig.http.get("/v1/videos", params={"limit": 2})).json()
    rest = (await rig.http.get("/v1/videos", params={"after": newest["last_id"]})).json()
    oldest = (await rig.http.get("/v1/videos", params={"order": "asc"})).json()

    assert [one["id"] for one in newest["data"]] == ids[:0:-1]
    assert newest["has_more"] is True
    assert [one["id"] for one in rest["data"]] == ids[:1]
    assert rest["has_more"] is False
    assert [one["id"] for one in oldest["data"]] == ids


async def test_cancelling_stops_the_engine(rig: PictureRig) -> None:
    rig.replica.script = half_done
    made = await create(rig)
    await until(rig, made["id"], "in_progress")

    cancelled = await rig.http.post(f"/v1/videos/{made['id']}/cancel")
    again = await rig.http.post(f"/v1/videos/{made['id']}/cancel")
    await eventually(lambda: bool(rig.replica.abort_calls))

    assert cancelled.json()["status"] == "failed"
    assert cancelled.json()["error"]["code"] == "cancelled"
    assert (again.status_code, again.json()["error"]["code"]) == (409, "video_ended")


async def test_deleting_a_running_job_leaves_nothing(rig: PictureRig, tmp_path: Path) -> None:
    rig.replica.script = half_done
    running = await create(rig)
    await until(rig, running["id"], "in_progress")
    deleted = await rig.http.delete(f"/v1/videos/{running['id']}")
    await eventually(lambda: bool(rig.replica.abort_calls))
    rig.replica.script = paints(VIDEOS)
    made = await create(rig)
    await until(rig, made["id"], "completed")
    await rig.http.delete(f"/v1/videos/{made['id']}")

    assert deleted.json() == {"id": running["id"], "object": "video.deleted", "deleted": True}
    assert (await rig.http.get("/v1/videos")).json()["data"] == []
    assert list((tmp_path / "videos").iterdir()) == []


async def test_a_failed_stage_is_the_jobs_error(rig: PictureRig) -> None:
    rig.replica.script = lambda request: [
        failure_output(request.request_id, "no memory", "out_of_memory")
    ]
    made = await create(rig)

    video = await until(rig, made["id"], "failed")
    content = await rig.http.get(f"/v1/videos/{made['id']}/content")

    assert video["error"] == {"code": "out_of_memory", "message": "no memory"}
    assert content.json()["error"]["code"] == "video_failed"


async def test_ids_that_are_none_of_ours_lead_nowhere(rig: PictureRig) -> None:
    for video_id in (
        "x",
        "video_" + "0" * 32,
        "..%2F..%2Fetc%2Fpasswd",
        "video_%00",
        "video_" * 99,
    ):
        for path in (f"/v1/videos/{video_id}", f"/v1/videos/{video_id}/content"):
            assert (await rig.http.get(path)).status_code == 404


async def test_one_job_too_many_is_told_to_come_again(
    text_parts: TextParts, tmp_path: Path
) -> None:
    limits = ServerLimits(max_queued_videos=1)
    async with picture_server(
        text_parts.args, task=Task.VIDEO, data_dir=tmp_path, script=half_done, limits=limits
    ) as rig:
        await create(rig)

        refused = await rig.http.post("/v1/videos", content=b"never read")

        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"


async def test_a_burst_of_jobs_is_refused_before_a_picture_is_decoded(
    text_parts: TextParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    original = image_loader.decode_image

    def counted(media: Any, limits: Any) -> Any:
        decoded.append(media.field)
        return original(media, limits)

    monkeypatch.setattr(image_loader, "decode_image", counted)
    limits = ServerLimits(max_queued_videos=3)
    async with picture_server(
        text_parts.args, task=Task.VIDEO, data_dir=tmp_path, script=half_done, limits=limits
    ) as rig:
        body = {"prompt": "a sea", "input_reference": data_url(png(64, 64))}
        answers = await asyncio.gather(*(rig.http.post("/v1/videos", json=body) for _ in range(30)))

    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(503)) == (3, 27)
    assert len(decoded) == 3


async def test_jobs_wait_for_a_place_in_the_engine(text_parts: TextParts, tmp_path: Path) -> None:
    limits = ServerLimits(max_in_flight=1)
    async with picture_server(
        text_parts.args, task=Task.VIDEO, data_dir=tmp_path, script=half_done, limits=limits
    ) as rig:
        first, second = await create(rig), await create(rig)
        await until(rig, first["id"], "in_progress")
        assert (await get(rig, second["id"]))["status"] == "queued"
        rig.replica.script = paints(VIDEOS)

        await rig.http.delete(f"/v1/videos/{first['id']}")

        await until(rig, second["id"], "completed")


async def test_videos_outlive_a_restart_and_what_ran_has_failed(
    text_parts: TextParts, tmp_path: Path
) -> None:
    async with picture_server(text_parts.args, task=Task.VIDEO, data_dir=tmp_path) as rig:
        made = await create(rig, prompt="kept")
        await until(rig, made["id"], "completed")
        rig.replica.script = half_done
        running = await create(rig)
        await until(rig, running["id"], "in_progress")

    async with picture_server(text_parts.args, task=Task.VIDEO, data_dir=tmp_path) as rig:
        kept, lost = await get(rig, made["id"]), await get(rig, running["id"])
        content = await rig.http.get(f"/v1/videos/{made['id']}/content")

    assert (kept["status"], kept["prompt"]) == ("completed", "kept")
    assert content.content[4:8] == b"ftyp"
    assert lost["status"] == "failed"
    assert lost["error"]["code"] == "server_stopped"


async def test_a_job_of_the_next_server_does_not_wait_for_the_clock_of_the_last(
    text_parts: TextParts, tmp_path: Path
) -> None:
    now = [1_000_000.0]
    limits = ServerLimits(video_expiry_s=60.0)
    arguments: dict[str, Any] = {"task": Task.VIDEO, "data_dir": tmp_path, "limits": limits}
    async with picture_server(text_parts.args, clock=lambda: now[0], **arguments) as rig:
        made = await create(rig)
        await until(rig, made["id"], "completed")
    now[0] += 61

    async with picture_server(text_parts.args, clock=lambda: now[0], **arguments) as rig:
        assert (await rig.http.get(f"/v1/videos/{made['id']}")).status_code == 404
    assert list((tmp_path / "videos").iterdir()) == []


async def test_a_video_is_deleted_when_its_time_is_over(
    text_parts: TextParts, tmp_path: Path
) -> None:
    limits = ServerLimits(video_expiry_s=1.0)
    async with picture_server(
        text_parts.args, task=Task.VIDEO, data_dir=tmp_path, limits=limits
    ) as rig:
        made = await create(rig)
        await until(rig, made["id"], "completed")

        await eventually(lambda: not list((tmp_path / "videos").iterdir()))

        assert (await rig.http.get(f"/v1/videos/{made['id']}")).status_code == 404


async def test_a_length_that_no_video_has_is_refused_with_the_longest_one(rig: PictureRig) -> None:
    answer = await rig.http.post("/v1/videos", json={"prompt": "a sea", "seconds": "100000"})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("above 0 and at most 3600")
