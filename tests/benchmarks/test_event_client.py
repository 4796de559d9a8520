"""The client of `audio_chunks` finds every event, however the bytes come."""

from __future__ import annotations

import time
from base64 import b64encode

import pytest

from benchmarks.event_client import EventListener
from benchmarks.stamped_voice import STAMP_BYTES


@pytest.mark.parametrize("size", [1, 3, 7, 100, 10_000])
async def test_every_event_is_found_once(size: int) -> None:
    listener = EventListener(b"")
    now = time.monotonic_ns()
    pcm = (now - 5_000_000).to_bytes(STAMP_BYTES, "little") + bytes(100)
    event = b'data: {"type": "speech.audio.delta", "audio": "' + b64encode(pcm) + b'"}\n\n'
    framed = b"%x\r\n%b\r\n" % (len(event), event)
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + 3 * framed + b'data: {"type": "speech.audio.done"}\n\n'

    for begin in range(0, len(stream), size):
        listener.data_received(stream[begin : begin + size])
    listener.connection_lost(None)

    assert len(listener.added_ms) == 3
    assert all(5.0 <= added <= 5_000.0 for added in listener.added_ms)
    assert b"speech.audio.done" in await listener.over
