"""A client of streamed speech that costs next to nothing: when is each event there?

Reads the socket itself. Only the first bytes of a chunk are decoded, for the time that
`stamped_voice` has put there; what a real client does with an event is no part of the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from typing import Final, cast
from urllib.parse import urlsplit

from benchmarks.stamped_voice import stamp

_BEFORE: Final = b'"audio": "'
_EVENT_END: Final = b'"}\n\n'
_STAMP_CHARS: Final = 12
_PATH: Final = "/v1/audio/speech"


class EventListener(asyncio.Protocol):
    """One connection: a request, and what the server answers to it."""

    def __init__(self, request: bytes) -> None:
        self.added_ms: list[float] = []
        self.over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """What remained when the answer ended."""
        self._request = request
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        start = max(0, len(self._unread) - len(_EVENT_END))
        self._unread += data
        while (end := self._unread.find(_EVENT_END, start)) >= 0:
            begin = self._unread.find(_BEFORE, 0, end)
            if begin < 0:
                break  # the event that ends the stream
            begin += len(_BEFORE)
            ready_ns = stamp(b64decode(self._unread[begin : begin + _STAMP_CHARS]))
            self.added_ms.append((now_ns - ready_ns) / 1e6)
            del self._unread[: end + len(_EVENT_END)]
            start = 0

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.over.set_exception(exc)
        else:
            self.over.set_result(bytes(self._unread))


async def listen(url: str, num_chunks: int) -> list[float]:
    """Milliseconds from the moment a chunk was ready to that at which it was here, for each event.

    Chunks that were sent together are one event.

    Raises:
        RuntimeError: the answer did not end as it should.
    """
    body = json.dumps(
        {
            "input": "tick " * num_chunks,
            "voice": "default",
            "response_format": "pcm",
            "stream_format": "sse",
        }
    ).encode()
    where = urlsplit(url)
    head = (
        f"POST {_PATH} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, listener = await asyncio.get_running_loop().create_connection(
        lambda: EventListener(head.encode() + body), where.hostname, where.port
    )
    rest = await listener.over
    if not listener.added_ms or b"speech.audio.done" not in rest:
        raise RuntimeError(f"the answer broke off: {rest[:500].decode(errors='replace')}")
    return listener.added_ms
