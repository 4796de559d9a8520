"""The end of a stream of codes that a vocoder would have, played by a test."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import Connector
from vllm_omni.engine.messages import StreamTarget

WAIT_S: Final = 90.0


class Heard:
    """The codes that one request sends to its vocoder."""

    def __init__(self, connector: Connector, stream: str) -> None:
        self.target = StreamTarget(connector.address, stream)
        self.codes: list[list[int]] = []
        self.end: str | None = None
        self.error = ""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        connector.receiver.subscribe(stream, self._take)

    def _take(self, frame: Frame) -> None:
        rows = np.frombuffer(frame.payload, "<i4").reshape(-1, frame.meta.get("groups", 1)).tolist()
        end, error = frame.end, frame.error
        frame.release()
        self._loop.call_soon_threadsafe(self._put, rows, end, error)

    def _put(self, rows: list[list[int]], end: str | None, error: str) -> None:
        self.codes += rows if end is None else []
        self.end, self.error = end, error
        self._changed.set()

    async def frames(self, num: int) -> list[list[int]]:
        """The codes once there are at least so many frames, or the stream has ended."""
        async with asyncio.timeout(WAIT_S):
            while len(self.codes) < num and self.end is None:
                self._changed.clear()
                await self._changed.wait()
        return self.codes

    async def all(self) -> list[list[int]]:
        """All codes of a stream that ends."""
        return await self.frames(1 << 30)
