"""What a test asks of processes that are not its own children: who they are, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

import psutil


class Family:
    """The processes below one, held by descriptors: their ids may be used again, these not."""

    def __init__(self, pid: int) -> None:
        self.pids = {os.pidfd_open(one): one for one in descendants(pid)}

    def __len__(self) -> int:
        return len(self.pids)

    def alive_after(self, seconds: float) -> list[int]:
        """Wait for their ends; who still lives then."""
        end_s = time.monotonic() + seconds
        waiting = select.poll()
        for pidfd in self.pids:
            waiting.register(pidfd, select.POLLIN)
        left = set(self.pids)
        while left and time.monotonic() < end_s:
            for pidfd, _ in waiting.poll(max(0.0, end_s - time.monotonic()) * 1000):
                waiting.unregister(pidfd)
                left.discard(pidfd)
        return [self.pids[pidfd] for pidfd in left]

    def close(self) -> None:
        """Kill what is left."""
        for pidfd in self.pids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self.pids.clear()


def descendants(pid: int) -> list[int]:
    """Processes below this one. They live: nobody has asked them to end."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
