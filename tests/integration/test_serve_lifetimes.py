"""`serve` on a tiny checkpoint, ended by a signal while it loads and while it serves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Family, descendants
from tests.tiny_models import make_tiny
from vllm_omni.distributed.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

SERVER_LIMIT_S = 30.0
"""How long the server may take to end: drain, replicas, interpreter, on busy cores."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


class Server:
    """A `serve` process whose log is read line by line."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = str(sock.getsockname()[1])
        words = ["serve", str(model_dir), "--omni", "--host", "127.0.0.1", "--port", port]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *words],
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.log: list[str] = []

    def until(self, word: str) -> None:
        """Read the log up to a line that holds the word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if word in line:
                return
        raise AssertionError("".join(self.log[-30:]))

    def end(self) -> int:
        rest, _ = self.process.communicate(timeout=SERVER_LIMIT_S)
        self.log.append(rest)
        return self.process.returncode


_MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be inherited as ignored
from vllm_omni.entrypoints.cli.main import main
main()
"""


@contextlib.contextmanager
def serving(model_dir: Path, folder: Path) -> Iterator[Server]:
    server = Server(model_dir, folder)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
@pytest.mark.parametrize(
    ("moment", "word", "code"),
    [("loading", "Initializing a V1 LLM engine", 0), ("serving", "serving on", 0)],
)
def test_a_signal_leaves_nothing(
    model_dir: Path, folder: Path, number: signal.Signals, moment: str, word: str, code: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    with serving(model_dir, folder) as server:
        server.until(word)
        family = Family(server.process.pid)
        try:
            assert descendants(server.process.pid)
            os.kill(server.process.pid, number)
            ended = server.end()
            assert family.alive_after(5.0) == []
        finally:
            family.close()

    base = folder / f"vllm-omni-{os.getuid()}"
    if number is signal.SIGKILL:
        RunDirectory.create("next", base).remove()
    else:
        assert ended == code, "".join(server.log[-30:])
    assert list(base.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= before
