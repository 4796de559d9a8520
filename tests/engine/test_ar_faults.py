"""Replicas that die or never start: seen at once, told on one line, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.ar_replicas import ENGINE_ARGS, greedy, replica, spec_of
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.ar_launch import start_ar_replica
from vllm_omni.errors import ConfigError, StageStartError
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = pytest.mark.slow

PROMPT = OmniPrompt(token_ids=[12, 40, 77, 5, 130, 9])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of this test's own; pytest's is too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        monkeypatch.setattr(tempfile, "tempdir", None)


async def test_a_killed_replica_is_known_dead_within_half_a_second(
    model_dir: Path, temporary_folder: Path
) -> None:
    async with replica(model_dir) as thinker:
        await thinker.submit("running", PROMPT, greedy(500))
        utility = asyncio.ensure_future(thinker.client.call_utility_async("num_requests"))
        await utility
        killed_s = time.monotonic()
        os.kill(thinker.client.pid, signal.SIGKILL)
        error = await asyncio.wait_for(asyncio.shield(thinker.death), 5)
        seen_s = time.monotonic() - killed_s

        assert isinstance(error, EngineDeadError)
        assert seen_s < 0.5
        assert str(error) == ("stage thinker/0 died: stage thinker/0 was killed by SIGKILL")
        with pytest.raises(EngineDeadError):
            thinker.client.check_health()
        with pytest.raises(EngineDeadError):
            await thinker.submit("after", PROMPT, greedy(1))
        with pytest.raises(EngineDeadError):
            await thinker.client.call_utility_async("num_requests")
        await thinker.client.abort_requests_async(["running"])
        await thinker.client.shutdown_async(1.0)
        await thinker.client.shutdown_async(1.0)
    assert sockets_in(temporary_folder) == []


def sockets_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


async def test_a_waiting_utility_ends_with_the_replica(model_dir: Path) -> None:
    async with replica(model_dir) as thinker:
        os.kill(thinker.client.pid, signal.SIGSTOP)
        utility = asyncio.ensure_future(thinker.client.call_utility_async("num_requests"))
        await asyncio.wait({utility}, timeout=0.1)
        assert not utility.done()
        os.kill(thinker.client.pid, signal.SIGKILL)

        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(utility, 5)


@pytest.fixture
def broken(model_dir: Path, tmp_path: Path) -> Path:
    """The checkpoint without its weights."""
    shutil.copytree(model_dir, tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "broken"


async def test_a_failing_loader_is_one_line(broken: Path) -> None:
    with pytest.raises(StageStartError) as failure:
        await start_ar_replica(spec_of(broken))

    assert "\n" not in str(failure.value)
    assert str(failure.value).startswith("stage thinker/0 did not start: ")
    assert "Cannot find any model weights" in str(failure.value)


@pytest.mark.parametrize(
    ("engine_args", "says"),
    [
        ({"max_model_length": 100}, "did you mean 'max_model_len'"),
        ({"max_model_len": 100_000}, "100000"),
        ({"dtype": "float99"}, "float99"),
    ],
)
async def test_a_wrong_engine_argument_is_one_line(
    model_dir: Path, engine_args: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        await start_ar_replica(spec_of(model_dir, engine_args={**ENGINE_ARGS, **engine_args}))

    assert "\n" not in str(refusal.value)
    assert says in str(refusal.value)
    assert "'thinker'" in str(refusal.value)


async def test_too_little_memory_for_the_cache_is_said(model_dir: Path) -> None:
    arguments = {**ENGINE_ARGS, "kv_cache_memory_bytes": 1000}
    with pytest.raises(StageStartError, match="No available memory for the cache"):
        await start_ar_replica(spec_of(model_dir, engine_args=arguments))


def test_the_replica_dies_with_its_parent(model_dir: Path) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from tests.ar_replicas import spec_of
        from vllm_omni.engine.ar_launch import start_ar_replica

        async def main():
            client = await start_ar_replica(spec_of(Path({str(model_dir)!r})))
            print("PID", client.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = next(int(line.split()[1]) for line in parent.stdout if line.startswith("PID"))
        pidfd = os.pidfd_open(child)
        parent.kill()
        parent.wait()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(5000), "the child lives on without its parent"
    finally:
        os.close(pidfd)
