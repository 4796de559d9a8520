"""The threads that decode and encode media, so that the event loop never does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class MediaPool:
    """A few threads for media work. The codecs release the GIL; admission bounds what waits."""

    def __init__(self, num_threads: int | None = None) -> None:
        workers = num_threads or max(2, min(4, os.cpu_count() or 2))
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="media")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread of the pool and wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Stop taking work. Repeatable."""
        self._executor.shutdown(wait=False, cancel_futures=True)
