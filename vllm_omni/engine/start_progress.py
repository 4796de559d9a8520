"""Whether a starting replica still makes progress: CPU time and bytes of its whole process tree.

Read from /proc by the parent, so that a loader that holds the interpreter lock for minutes is
seen working, and only while a replica starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIN_CPU_SHARE = 0.05
"""Share of one core below which a process counts as idle: above heartbeats and polling threads."""
MIN_IO_BYTES = 256 * 1024
"""Bytes between two looks below which nothing is being loaded."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process tree has consumed so far."""

    cpu_s: float = 0.0
    io_bytes: int = 0


def tree_usage(pid: int) -> Usage:
    """CPU time and bytes read or written by `pid` and its living descendants."""
    cpu_s, io_bytes = _process_cpu_s(pid), _process_io_bytes(pid)
    for child in _children(pid):
        usage = tree_usage(child)
        cpu_s, io_bytes = cpu_s + usage.cpu_s, io_bytes + usage.io_bytes
    return Usage(cpu_s, io_bytes)


class ProgressWatch:
    """Remembers when a process tree last did something."""

    def __init__(
        self, pid: int, clock: Callable[[], float], usage: Callable[[int], Usage] = tree_usage
    ) -> None:
        self._pid, self._clock, self._usage = pid, clock, usage
        self._last_look = self._last_progress = clock()
        self._seen = usage(pid)

    def mark(self) -> None:
        """The process itself said that it gets on."""
        self._last_progress = self._clock()

    def idle_s(self) -> float:
        """Look now; seconds since the last sign of progress."""
        now, usage = self._clock(), self._usage(self._pid)
        cpu_s = usage.cpu_s - self._seen.cpu_s
        if (
            cpu_s > MIN_CPU_SHARE * (now - self._last_look)
            or usage.io_bytes - self._seen.io_bytes > MIN_IO_BYTES
        ):
            self._last_progress = now
        self._last_look, self._seen = now, usage
        return now - self._last_progress


def _process_cpu_s(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # utime, stime, and those of descendants that were waited for
    return sum(map(int, fields[11:15])) / _TICKS_PER_S if len(fields) > 14 else 0.0


def _process_io_bytes(pid: int) -> int:
    counts = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    # rchar misses pages read through a memory map, read_bytes misses what was cached
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [
        int(child)
        for thread in threads
        for child in _read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process is gone, or this kernel does not tell
        return ""
