"""The demo writes what it promises and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import descendants, title
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DEMO = Path(__file__).resolve().parents[2] / "benchmarks/demo.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@contextlib.contextmanager
def running_demo(model_dir: Path, out_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(DEMO), "--model", str(model_dir), "--out", str(out_dir)]
    demo = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        yield demo
    finally:
        for pid in reversed(descendants(demo.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        demo.wait()
        assert demo.stdout is not None
        demo.stdout.close()


def wait_for_server(demo: subprocess.Popen[str], log: Path) -> list[int]:
    """The processes below the demo, once the server writes to its log."""
    while demo.poll() is None:
        below = descendants(demo.pid)[1:]
        if below and log.exists() and log.stat().st_size:
            return below
        with contextlib.suppress(subprocess.TimeoutExpired):
            demo.wait(timeout=0.1)
    raise AssertionError(f"the demo ended with exit code {demo.returncode}")


def wait_gone(pids: list[int]) -> None:
    """Wait for processes that are not our children; the test's own time limit ends it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [])
            finally:
                os.close(fd)
    assert [title(pid) for pid in pids if descendants(pid)] == []


def test_it_writes_both_answers_and_their_timings(model_dir: Path, tmp_path: Path) -> None:
    with running_demo(model_dir, tmp_path) as demo:
        below = wait_for_server(demo, tmp_path / "server.log")
        output, _ = demo.communicate()

    assert demo.returncode == 0, (tmp_path / "server.log").read_text()[-3000:]
    wait_gone(below)
    timings = json.loads((tmp_path / "timings.json").read_text())
    assert json.loads(output.splitlines()[-1]) == timings
    assert timings["ready_s"] > 0
    assert set(timings["stages"]) == {"asr", "thinker", "voice"}
    for answer in timings["answers"]:
        assert 0 < answer["first_text_s"] <= answer["total_s"]
        assert 0 < answer["first_audio_s"] <= answer["total_s"]
    assert (tmp_path / "answer.txt").read_text().strip()
    with wave.open(str(tmp_path / "answer.wav")) as file:
        spoken_s = sum(answer["audio_s"] for answer in timings["answers"])
        assert file.getnframes() / file.getframerate() == pytest.approx(spoken_s + 0.5, abs=0.01)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(
    model_dir: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    with running_demo(model_dir, tmp_path) as demo:
        below = wait_for_server(demo, tmp_path / "server.log")
        demo.send_signal(signum)
        demo.wait()

        wait_gone(below)


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--model", str(tmp_path / "no"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "does not exist" in done.stderr
