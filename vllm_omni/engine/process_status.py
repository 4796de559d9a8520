"""What a replica's process tells its parent on the status socket, and how its end is described.

A closed set of tagged structs, one per packet. The socket is a `SOCK_SEQPACKET` pair: its end of
file is also how each side learns at once that the other is gone.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_PACKET_BYTES = 64 * 1024
_MAX_DETAIL_CHARS = 24 * 1024


class Progress(msgspec.Struct, tag="progress", frozen=True, forbid_unknown_fields=True):
    """Loading goes on; counts as progress whatever the process's CPU time says."""

    what: str


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """A real self-request went through; the replica takes requests."""

    info: dict[str, Any]
    """What the stage's client needs to reach the replica (socket addresses, limits)."""


class Beat(msgspec.Struct, tag="beat", frozen=True, forbid_unknown_fields=True):
    """About once a second while the process can run Python at all."""

    cpu_s: float
    """CPU time of the process so far."""
    rss_bytes: int
    figures: dict[str, float]
    """What the target reports of itself (`num_running`, `num_forwards`, ...)."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a heartbeat says about going on, and when it was heard."""

    received_s: float
    """On `time.monotonic` of the parent."""
    progress: float
    """Grows with every step, forward or command that the replica has completed."""
    num_runnable: float
    """Requests that it could go on with now, those of a running step included."""


class Failed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The target raised; the process exits after this packet."""

    message: str
    """One line: the error's type and text."""
    detail: str
    """Traceback, for the log."""


StatusMessage = Progress | Ready | Beat | Failed

encode_status = msgspec.msgpack.Encoder().encode
decode_status = msgspec.msgpack.Decoder(StatusMessage).decode


def failed_from(error: BaseException, detail: str) -> Failed:
    """The packet for an exception; its text is folded into one bounded line."""
    text = " ".join(str(error).split())[:2000]
    name = type(error).__name__
    return Failed(f"{name}: {text}" if text else name, detail[-_MAX_DETAIL_CHARS:])


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a replica's process ended."""

    name: str
    """`voice/0`."""
    return_code: int
    """As in `subprocess`: negative for a signal."""
    error: str = ""
    """The process's own error, one line; empty when it reported none."""

    def __str__(self) -> str:
        if self.return_code < 0:
            try:
                how = f"was killed by {signal.Signals(-self.return_code).name}"
            except ValueError:
                how = f"was killed by signal {-self.return_code}"
        else:
            how = f"exited with code {self.return_code}"
        return f"stage {self.name} {how}" + (f": {self.error}" if self.error else "")
