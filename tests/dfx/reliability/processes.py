"""The processes of a server, found by their titles, and their ends as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from benchmarks.served import descendants, title

_TITLE: Final = "vllm-omni: "
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def listening_pid(url: str) -> int | None:
    """The process on this host that listens where the URL points; None when there is none."""
    parts = urlsplit(url)
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == parts.port:
            return connection.pid
    return None


def replica_pids(server_pid: int) -> dict[str, int]:
    """`voice/0` and its like to process ids; only processes that carry their title already."""
    found = {}
    for pid in descendants(server_pid):
        name = title(pid)
        if name.startswith(_TITLE) and "/" in name:
            found.setdefault(name.removeprefix(_TITLE).strip(), pid)
    return found


async def ended(pid: int, timeout_s: float) -> None:
    """Wait for the end of any process; TimeoutError when it does not come."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, over.set)
        try:
            async with asyncio.timeout(timeout_s):
                await over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def send(pid: int, signum: signal.Signals) -> float:
    """Signal a process; the moment at which it was done."""
    os.kill(pid, signum)
    return time.monotonic()


def shared_memory_of(pid: int) -> Path:
    """/dev/shm as the process sees it."""
    return Path(f"/proc/{pid}/root/dev/shm")


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """A folder of a small file system without a byte left."""
    path = folder / "filled-by-test"
    with path.open("wb", buffering=0) as file:
        try:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(_PAGE_BYTES))
            assert os.statvfs(folder).f_bavail == 0
            yield
        finally:
            path.unlink()
