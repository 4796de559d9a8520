"""SIGINT and SIGTERM: the first drains, the second ends at once, and the end has a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Final

from vllm_omni.distributed.run_directory import remove_run_directories

logger = logging.getLogger(__name__)

SECOND_SIGNAL_S: Final = 2.0
"""Time between the second signal and the end, for what is left to be told and closed."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Signals as events of the running loop, from the start of the server to its end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        """Stop taking requests, finish those that run."""
        self.second = asyncio.Event()
        """Stop now."""
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.raise_once)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def raise_once(self) -> None:
        """One signal more."""
        if not self.first.is_set():
            self.first.set()
        elif not self.second.is_set():
            self.second.set()
            self.leave_within(SECOND_SIGNAL_S)

    def leave_within(self, seconds: float) -> None:
        """End the process after this time if it has not ended by itself, whatever hangs.

        A thread of its own keeps the time: the loop may be what hangs.
        """
        timer = threading.Timer(seconds, _leave, [seconds])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def _leave(seconds: float) -> None:
    """Replicas die with this process; what would stay behind is removed here."""
    logger.critical("the server did not end within %g s and is ended", seconds)
    remove_run_directories()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
