"""A server as a child process of a benchmark: started, awaited, and gone whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tqdm import tqdm

STOP_TIMEOUT_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_LOG_TAIL_LINES: Final = 15


class ServerError(RuntimeError):
    """The server did not start, or ended by itself."""


class Server:
    """A running server and the processes below it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.ready_s = 0.0
        """From the start of the process to the first `/health` that is fine."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s) as response:
            body: bytes = response.read()
        return body

    def check(self) -> None:
        """Raise ServerError, with the end of its log, when the server is gone."""
        if (code := self.process.poll()) is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise ServerError("\n".join([f"the server ended with exit code {code}:", *lines]))

    def processes(self) -> dict[int, str]:
        """Every process of the server by its id, with its title."""
        return {pid: title(pid) for pid in descendants(self.process.pid)}

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes: shared pages count once."""
        return sum(pss_bytes(pid) for pid in self.processes())


def own_and_served(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A benchmark's own arguments, and behind `--` those of `vllm serve`."""
    cut = words.index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut + 1 :])


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    arguments: list[str],
    *,
    port: int = 0,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Server]:
    """Start `vllm serve MODEL --omni` and wait until it is ready; stop it on the way out.

    `env` is added to the environment; `inside` is a command that runs the rest of its words.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    port = port or free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*inside, str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--omni", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with log.open("wb") as output:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is for us; the server is told by `_stop`
            preexec_fn=_die_with_parent,
        )
        server = Server(process, port, log)
        try:
            _wait_ready(server, started_s, timeout_s)
            yield server
        finally:
            _stop(server)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(server: Server, started_s: float, timeout_s: float) -> None:
    # Not a terminal: a line now and then instead of one that is written over.
    redraw_s = 0.2 if sys.stderr.isatty() else 10.0
    layout = "{desc:<28}{elapsed}"
    with tqdm(desc="starting the server", bar_format=layout) as bar:
        drawn_s = started_s
        while not _is_healthy(server):
            server.check()
            if time.monotonic() - drawn_s > redraw_s:
                drawn_s = time.monotonic()
                bar.refresh()
            if drawn_s - started_s > timeout_s:
                raise ServerError(f"not ready after {timeout_s:.0f} s; its log: {server.log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=0.2)
        server.ready_s = time.monotonic() - started_s


def _is_healthy(server: Server) -> bool:
    try:
        server.get("/health", timeout_s=5.0)
    except (urllib.error.URLError, OSError):
        return False
    return True


def _stop(server: Server) -> None:
    """Ask, then insist; afterwards no process of the server is left."""
    below = descendants(server.process.pid)
    with contextlib.suppress(ProcessLookupError):
        server.process.terminate()
    try:
        server.process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    deadline_s = time.monotonic() + 5.0
    while (left := [pid for pid in below if _is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        print(f"process {pid} ({title(pid)}) was left behind: killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid] if _is_alive(pid) else []
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def title(pid: int) -> str:
    """What `ps` shows of a process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= 60 else f"{text[:57]}..."


def pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken so far; its threads included."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
