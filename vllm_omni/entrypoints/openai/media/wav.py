"""The RIFF/WAVE header: written for one stream or file, and checked on what clients send."""

from __future__ import annotations

import struct

_UNKNOWN_SIZES = frozenset({0, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF, 0xFFFFFFFF - 36})
"""Sizes that writers put in a header before they know the length."""


def wav_header(sample_rate_hz: int, num_bytes: int | None) -> bytes:
    """Header of mono 16 bit PCM. `num_bytes` None: a stream whose length is not known yet."""
    riff = 0xFFFFFFFF if num_bytes is None else 36 + num_bytes
    data = 0xFFFFFFFF if num_bytes is None else num_bytes
    rate = sample_rate_hz
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return b"RIFF" + struct.pack("<I", riff) + b"WAVE" + form + struct.pack("<4sI", b"data", data)


def missing_bytes(data: bytes) -> int:
    """How many bytes of samples the header promises beyond the end of the file."""
    at = 12
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"data":
            return 0 if size in _UNKNOWN_SIZES else max(0, at + 8 + size - len(data))
        at += 8 + size + (size & 1)
    return at - len(data) if at > len(data) else 0
