"""The connector protocol: how chunks of a request go from one replica to another.

A stream belongs to one request and one edge. Its frames arrive in order, each exactly once, and
it always ends with an explicit end or error. The receiver grants credits; a sender without
credit keeps frames in a bounded outbox and never blocks its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Frame:
    """One frame as the receiver sees it."""

    stream: str
    seq: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Small plain facts about the payload (dtype, shape, kind)."""
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """Valid until `release`."""
    end: str | None = None
    """Reason when this is the stream's last frame: `stop`, `length`, `abort`, `error`; or, said by
    the receiver itself, `lost` when the sending replica went away before it ended the stream, and
    `broken` when what arrived is not what is due."""
    error: str = ""
    """Message when `end` is `error`, `lost` or `broken`."""
    release: Callable[[], None] = lambda: None
    """Gives memory and credit back to the sender. Call once, when the payload was read."""


class Sender(Protocol):
    """A replica's outgoing half. Every method is thread-safe and returns at once."""

    def open(self, address: str, stream: str) -> None:
        """Announce a stream to the replica at `address`."""

    def push(self, stream: str, payload: Buffer, meta: Mapping[str, Any] | None = None) -> None:
        """Send the next chunk. After an overflow or the receiver's loss the stream is failed and
        pushes to it are dropped; `on_failure` of the sender's constructor hears of it."""

    def together(self) -> AbstractContextManager[None]:
        """What is sent inside leaves as one message for each receiver, which is woken once by it:
        requests that were one step of a stage are one step of the next. Other threads wait."""

    def end(self, stream: str, reason: str = "stop") -> None:
        """End a stream; what was pushed before arrives first."""

    def fail(self, stream: str, message: str) -> None:
        """End a stream with an error."""

    def close(self) -> None:
        """Stop the sender and free what it holds. Repeatable."""


class Receiver(Protocol):
    """A replica's incoming half. Frames are handed to `on_frame` in the connector's own thread."""

    address: str
    """Where senders reach it."""

    def subscribe(
        self,
        stream: str,
        on_frame: Callable[[Frame], None],
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        """Take the frames of a stream, also those that arrived before (bounded by credits).

        `on_arrival` is called once when all frames that came together were handed over.
        """

    def cancel(self, stream: str) -> None:
        """Not interested any more: frames are dropped and the sender is told."""

    def close(self) -> None:
        """Stop receiving. Repeatable."""
