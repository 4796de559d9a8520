"""How much of what clients sent this process holds at once: bodies, and media as they were decoded.

Every bound on one item may be kept while many requests together are too much: a file of silence or
of one colour is small, and thousands of times larger in memory. Lives on the server's loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from vllm_omni.errors import BadRequestError, OverloadedError

FREE_BYTES: Final = 64 * 1024
"""Of each request that are not counted, so that plain text is served while media wait."""

_CURRENT: ContextVar[_Share | None] = ContextVar("input_share", default=None)


class InputMemory:
    """The bound that all requests share."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[_Share]:
        """What one request holds until it is over; `hold` adds to it."""
        share = _Share(self)
        token = _CURRENT.set(share)
        try:
            yield share
        finally:
            _CURRENT.reset(token)
            share.release()


class _Share:
    """One request's part."""

    def __init__(self, memory: InputMemory) -> None:
        self._memory = memory
        self._num_bytes = 0
        self._num_counted = 0

    def add(self, num_bytes: int, field: str | None = None) -> None:
        """Hold more.

        Raises:
            BadRequestError: this request alone is over the bound.
            OverloadedError: all together are.
        """
        self._num_bytes += num_bytes
        counted = max(0, self._num_bytes - FREE_BYTES)
        more, self._num_counted = counted - self._num_counted, counted
        self._memory.num_bytes += more
        if counted > self._memory.max_bytes:
            raise BadRequestError(
                f"the request and its media, decoded, have more than {self._memory.max_bytes} "
                "bytes",
                field=field,
            )
        if more and self._memory.num_bytes > self._memory.max_bytes:
            raise OverloadedError(
                "running requests hold as much media as this server takes; try again"
            )

    def release(self) -> None:
        self._memory.num_bytes -= self._num_counted
        self._num_bytes = self._num_counted = 0


def hold(num_bytes: int, field: str) -> None:
    """Count decoded media against the request that is being served here, if one is.

    Raises:
        OmniError: as `_Share.add`.
    """
    share = _CURRENT.get()
    if share is not None:
        share.add(num_bytes, field)
