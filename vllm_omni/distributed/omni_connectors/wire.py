"""What two mailboxes of the data plane say to each other: a closed set of tagged structs.

Every message names its sender's mailbox. `Chunk` may be followed by one raw frame, the payload.
Several that travel together are each followed by one, which may be empty.
Data flows sender -> receiver (Hello, Segment, Open, Chunk, End), control flows back (Welcome,
Release, Cancel).
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 2

WINDOW_UNITS = 256
"""Credit of one stream: what may be sent and not yet released."""
UNIT_BYTES = 64 * 1024

MAX_PAYLOAD_BYTES = 1 << 30


def units_of(size_bytes: int) -> int:
    """What a frame costs of its stream's credit; both sides compute it alike."""
    return 1 + size_bytes // UNIT_BYTES


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    mailbox: int
    """Identity of the mailbox that sends this."""


class Hello(_Message, tag="hello", frozen=True):
    """First message to a mailbox. The probe shows whether both see the same memory."""

    version: int
    name: str
    """`thinker/0`: for errors and logs."""
    address: str
    pid: int
    probe_fd: int
    """A sealed memfd of process `pid` that holds `token`; -1: there is no memory to share."""
    token: bytes


class Welcome(_Message, tag="welcome", frozen=True):
    """Answer to Hello."""

    name: str
    address: str
    shares_memory: bool


class Segment(_Message, tag="segment", frozen=True):
    """A shared-memory segment, announced once before its first use."""

    segment: int
    fd: int
    size_bytes: int


class Open(_Message, tag="open", frozen=True):
    stream: str


class Chunk(_Message, tag="chunk", frozen=True):
    """One frame of a stream; its payload lies in a slot, or follows as a raw frame."""

    stream: str
    seq: int
    meta: dict[str, Any]
    size_bytes: int
    slot: int = -1
    """-1: the payload follows."""
    segment: int = -1
    offset: int = 0


class End(_Message, tag="end", frozen=True):
    """The last frame of a stream."""

    stream: str
    seq: int
    reason: str
    message: str = ""


class Release(_Message, tag="release", frozen=True):
    """The receiver has read frames: their credit and slots go back."""

    stream: str
    units: int
    slots: list[int]


class Cancel(_Message, tag="cancel", frozen=True):
    """The receiver does not want this stream any more."""

    stream: str
    message: str


ToReceiver = Hello | Segment | Open | Chunk | End
ToSender = Welcome | Release | Cancel
Message = ToReceiver | ToSender

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
