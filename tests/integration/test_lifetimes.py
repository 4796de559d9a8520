"""However a program that uses the library ends, at whatever moment: nothing of it stays.

Real processes. A moment is told by the program itself, an end is an event of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Family
from vllm_omni.distributed.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(180)]

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
CHILD_LIMIT_S = 5.0
"""How long a replica may outlive its parent."""
PROGRAM_LIMIT_S = 40.0
"""How long a program may take to end; these share two cores with others."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """TMPDIR of the program; pytest's own is too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


class Program:
    """A running program of `tests.lifetimes` and the processes below it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        pipe = folder / "moment"
        os.mkfifo(pipe)
        kind, moment, *ending = arguments
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lifetimes", kind, moment, str(pipe), *ending],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.said = ""
        try:
            self.moment = pipe.read_text()
            self.children = Family(self.pid)
        except BaseException:  # whoever interrupts the test has nobody to close yet
            self._kill()
            raise

    def end(self) -> int:
        """Wait for the program and for its replicas; its return code."""
        _, said = self._process.communicate(b"\n", timeout=PROGRAM_LIMIT_S)
        self.said = said.decode()
        assert self.children.alive_after(CHILD_LIMIT_S) == []
        return self._process.returncode

    def close(self) -> None:
        self.children.close()
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def program(folder: Path, *arguments: str) -> Iterator[Program]:
    running = Program(folder, *arguments)
    try:
        yield running
    finally:
        running.close()


def nothing_stays(folder: Path) -> bool:
    """After the next start at the latest: no folder, nothing in /dev/shm."""
    base = folder / f"vllm-omni-{os.getuid()}"
    mine = RunDirectory.create("next", base)
    left = [path for path in base.iterdir() if path != mine.path]
    mine.remove()
    assert not left
    return True


@pytest.fixture(autouse=True)
def no_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def assert_interrupted(script: Program, code: int, number: signal.Signals) -> None:
    """By the signal itself, or by its exception, as Python does; replicas may log meanwhile."""
    if number is signal.SIGINT:
        assert code in (1, -signal.SIGINT), script.said
        assert "KeyboardInterrupt" in script.said.splitlines(), script.said
    else:
        assert code == -number, script.said


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", ["starting", "idle", "busy"])
def test_a_signal_ends_a_script_and_its_replicas(
    folder: Path, moment: str, number: signal.Signals
) -> None:
    with program(folder, "omni", moment) as script:
        assert len(script.children) == 1
        os.kill(script.pid, number)
        code = script.end()

    assert_interrupted(script, code, number)
    assert nothing_stays(folder)


@pytest.mark.parametrize("moment", ["starting", "busy"])
def test_control_c_ends_a_program_on_an_event_loop(folder: Path, moment: str) -> None:
    with program(folder, "async_omni", moment) as script:
        os.kill(script.pid, signal.SIGINT)
        code = script.end()

    assert_interrupted(script, code, signal.SIGINT)
    assert nothing_stays(folder)


@pytest.mark.parametrize("kind", ["omni", "async_omni"])
@pytest.mark.parametrize(("ending", "expected"), [("raise", 1), ("exit", 3), ("return", 0)])
def test_a_program_that_forgets_to_shut_down_leaves_no_process(
    folder: Path, kind: str, ending: str, expected: int
) -> None:
    with program(folder, kind, "idle", ending) as script:
        code = script.end()

    assert code == expected, script.said
    assert nothing_stays(folder)


def test_the_end_of_a_program_is_no_death_of_its_replicas(folder: Path) -> None:
    """vLLM's client closes itself when the interpreter ends."""
    with program(folder, "text_omni", "idle", "return") as script:
        code = script.end()

    assert code == 0, script.said
    assert "died" not in script.said
    assert "started again" not in script.said
    assert nothing_stays(folder)


def test_a_start_removes_what_the_dead_left_and_nothing_of_the_living(folder: Path) -> None:
    base = folder / f"vllm-omni-{os.getuid()}"
    with program(folder, "omni", "idle") as living:
        of_living = set(base.iterdir())
        (folder / "moment").unlink()
        with program(folder, "omni", "idle") as killed:
            os.kill(killed.pid, signal.SIGKILL)
            killed.end()
        assert set(base.iterdir()) > of_living, "the killed one's folder waits for the next start"
        RunDirectory.create("next", base).remove()

        assert set(base.iterdir()) == of_living
        os.kill(living.pid, signal.SIGTERM)
        living.end()
