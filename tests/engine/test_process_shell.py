"""Replicas' processes start, report, fail and die as their parent has to know it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine import shell_targets
from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.interpreter import SWITCH_INTERVAL_S
from vllm_omni.engine.process_shell import ReplicaProcess
from vllm_omni.engine.process_status import Beat, ProcessExit
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.start_progress import ProgressWatch, Usage
from vllm_omni.errors import StageStartError

Target = Callable[..., None]


def spec(**changes: object) -> ReplicaSpec:
    values: dict[str, object] = {
        "stage": "voice",
        "stage_id": 0,
        "replica_id": 1,
        "kind": StageKind.ONE_SHOT,
        "model_dir": Path("/"),
        "model_class": None,
        "devices": ("cpu",),
        "num_threads": 3,
        "max_batch_size": 1,
        "start_timeout_s": 10.0,
        **changes,
    }
    return ReplicaSpec(**values)  # type: ignore[arg-type]


@asynccontextmanager
async def running(target: Target, **kwargs: object) -> AsyncIterator[ReplicaProcess]:
    process = await ReplicaProcess.start(target, spec(env={"MINE": "yes"}), kwargs)
    try:
        yield process
    finally:
        await process.stop(5)


async def exit_of(process: ReplicaProcess) -> ProcessExit:
    return await asyncio.wait_for(asyncio.shield(process.died), 5)


async def start_error(target: Target, start_timeout_s: float = 10.0, **kwargs: object) -> str:
    with pytest.raises(StageStartError) as error:
        await ReplicaProcess.start(target, spec(start_timeout_s=start_timeout_s), kwargs)
    return str(error.value)


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def wait_gone(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether a process that is not our child ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


async def test_a_ready_process_has_title_environment_and_threads_of_its_spec() -> None:
    async with running(shell_targets.serve) as process:
        assert title_of(process.pid) == "vllm-omni: voice/1"
        assert process.info == {
            "OMP_NUM_THREADS": "3",
            "mine": "yes",
            "switch_interval_s": pytest.approx(SWITCH_INTERVAL_S),
        }
        assert repr(process) == f"<ReplicaProcess voice/1 pid={process.pid} started>"


async def test_a_running_process_beats() -> None:
    async with running(shell_targets.serve) as process:
        beats: asyncio.Queue[Beat] = asyncio.Queue(100)
        process.on_beat = beats.put_nowait
        beat = await asyncio.wait_for(beats.get(), 5)

        assert beat.rss_bytes > 1_000_000
        assert process.beat is beat


async def test_an_interrupt_from_the_terminal_is_left_to_the_parent() -> None:
    async with running(shell_targets.serve) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)

        assert (await exit_of(process)).return_code == 0


async def test_what_a_process_says_of_its_failure_is_heard_before_its_end() -> None:
    process = ReplicaProcess.spawn(shell_targets.say_and_stay, spec(), {})
    try:
        with pytest.raises(StageStartError, match="RuntimeError: the device is gone"):
            await process.wait_ready()
        assert process.own_error() == "RuntimeError: the device is gone"
    finally:
        await process.stop(0.0)


async def test_a_failing_loader_reports_its_own_error_on_one_line() -> None:
    text = await start_error(shell_targets.fail)

    assert text == "stage voice/1 did not start: ValueError: weights are missing"


async def test_a_loader_that_hangs_is_killed_and_says_where() -> None:
    text = await start_error(shell_targets.hang, start_timeout_s=0.5)

    assert text.startswith("stage voice/1 made no progress for")
    assert text.endswith("while reading weights")


async def test_a_slow_loader_that_works_is_not_killed() -> None:
    begin = time.monotonic()
    process = await ReplicaProcess.start(
        shell_targets.work_then_serve, spec(start_timeout_s=0.5), {"seconds": 2.0}
    )
    await process.stop(5)

    assert time.monotonic() - begin > 2.0


async def test_a_death_during_start_names_the_signal() -> None:
    text = await start_error(shell_targets.die)

    assert text == "stage voice/1 was killed by SIGKILL while reading weights"


async def test_a_target_that_returns_without_being_ready_did_not_start() -> None:
    text = await start_error(shell_targets.return_at_once)

    assert text.startswith("stage voice/1 exited with code 0 while")


async def test_a_target_that_cannot_be_imported_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell_targets.serve, "__module__", "__main__")

    with pytest.raises(ValueError, match="must be importable"):
        await ReplicaProcess.start(shell_targets.serve, spec(), {})


async def test_a_cancelled_start_leaves_no_process() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ReplicaProcess.start(shell_targets.hang, spec(), {}), 0.2)

    assert not children()


async def test_a_killed_process_is_noticed_at_once() -> None:
    async with running(shell_targets.serve) as process:
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)

        assert str(await exit_of(process)) == "stage voice/1 was killed by SIGKILL"
        assert time.monotonic() - begin < 0.5


async def test_an_error_while_serving_is_in_the_exit() -> None:
    async with running(shell_targets.fail_while_serving) as process:
        ended = await exit_of(process)

    assert str(ended) == "stage voice/1 exited with code 1: RuntimeError: the device is lost"


async def test_stopping_lets_the_target_finish(tmp_path: Path) -> None:
    goodbye = tmp_path / "goodbye"
    async with running(shell_targets.serve_until_stopped, goodbye=str(goodbye)) as process:
        await process.stop(5)

        assert goodbye.read_text() == "bye"
        assert process.died.result().return_code == 0


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    async with running(shell_targets.serve_deaf) as process:
        await process.stop(0.2)

        assert process.died.result().return_code == -signal.SIGKILL
        await process.stop(0.2)


async def test_processes_of_a_replica_go_with_it() -> None:
    async with running(shell_targets.serve_with_child) as process:
        process.kill()
        await exit_of(process)

        assert wait_gone(process.info["grandchild"])


_PARENT = """
import asyncio
from pathlib import Path
from tests.engine import shell_targets
from tests.engine.test_process_shell import spec
from vllm_omni.engine.process_shell import ReplicaProcess

async def main():
    process = ReplicaProcess.spawn(shell_targets.{target}, spec(start_timeout_s=60), {{}})
    if {wait}:
        await process.wait_ready()
    print(process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("target", "wait"), [("serve", True), ("serve", False), ("hang", False)])
def test_a_child_dies_with_its_parent_however_that_dies(
    how: signal.Signals, target: str, wait: bool
) -> None:
    code = _PARENT.format(target=target, wait=wait)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(how)
        parent.wait(10)

    assert wait_gone(child)


async def test_starting_and_stopping_leaves_no_open_file() -> None:
    async with running(shell_targets.serve):
        pass
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        async with running(shell_targets.serve):
            pass
        await start_error(shell_targets.fail)

    assert os.listdir("/proc/self/fd") == before


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("per_second", "idle_s"),
    [
        (Usage(), 10.0),
        (Usage(cpu_s=0.02), 10.0),  # heartbeats and polling threads are not progress
        (Usage(cpu_s=0.2), 0.0),
        (Usage(io_bytes=1_000_000), 0.0),
    ],
)
def test_progress_is_cpu_time_or_bytes(per_second: Usage, idle_s: float) -> None:
    clock = Clock()

    def usage(pid: int) -> Usage:
        return Usage(per_second.cpu_s * clock.now, int(per_second.io_bytes * clock.now))

    watch = ProgressWatch(1, clock, usage)
    for second in range(1, 11):
        clock.now = float(second)
        seen = watch.idle_s()

    assert seen == idle_s


def test_a_word_of_progress_starts_the_time_anew() -> None:
    clock = Clock()
    watch = ProgressWatch(1, clock, lambda pid: Usage())
    clock.now = 5.0
    watch.mark()
    clock.now = 6.0

    assert watch.idle_s() == 1.0
