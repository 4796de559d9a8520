"""Who may start on an accelerator: one that measures its memory, or any number that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DeviceTurns:
    """Turns on one device, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_together = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    def __repr__(self) -> str:
        return f"<DeviceTurns together={self._num_together} alone={self._turn.locked()}>"

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nobody else starts on the device meanwhile."""
        async with self._turn:
            await self._is_free.wait()
            yield

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Others that do not measure start beside it."""
        async with self._turn:
            self._num_together += 1
            self._is_free.clear()
        try:
            yield
        finally:
            self._num_together -= 1
            if not self._num_together:
                self._is_free.set()
