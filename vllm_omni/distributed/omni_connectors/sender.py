"""The sending half of the ZeroMQ connector: credits, bounded outboxes, slots, failure of streams.

Any thread pushes; with credit in hand the message leaves in that call. What has no credit waits in
the stream's outbox and leaves from the mailbox's thread when the receiver releases frames.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.base import Buffer
from vllm_omni.distributed.omni_connectors.mailbox import Mailbox, Peer
from vllm_omni.distributed.omni_connectors.shared_memory import (
    PoolSegment,
    Slot,
    SlotPool,
    create_segment,
)

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = 32 * 1024
"""Larger payloads go through shared memory where there is some."""
MAX_OUTBOX_FRAMES = 1024
MAX_OUTBOX_BYTES = 64 * 1024 * 1024

OnFailure = Callable[[str, str], None]
"""Called with stream id and message when a stream failed or was cancelled by its receiver; in the
mailbox's thread, or in the thread whose push overflowed. Must be quick."""


@dataclass(slots=True, eq=False)
class _Link:
    """One receiver's mailbox."""

    peer: Peer
    shares_memory: bool = False
    slots: set[int] = field(default_factory=set)
    """Slots that hold payloads for this receiver: waiting here or not yet released there."""
    announced: set[int] = field(default_factory=set)
    streams: dict[str, _Outgoing] = field(default_factory=dict)
    unsent_ends: dict[str, wire.End] = field(default_factory=dict)
    """Ends that found the receiver's queue full; they go out when it is heard of again."""


@dataclass(slots=True)
class _Parcel:
    """Messages that go to one receiver together."""

    parts: list[bytes] = field(default_factory=list)
    """Each a header and its payload."""
    streams: set[str] = field(default_factory=set)
    ends: dict[str, wire.End] = field(default_factory=dict)


@dataclass(slots=True)
class _Waiting:
    meta: Mapping[str, Any]
    size_bytes: int
    payload: Buffer | None
    slot: Slot | None


@dataclass(slots=True, eq=False)
class _Outgoing:
    """One stream that is not ended yet."""

    stream: str
    link: _Link
    credit: int = wire.WINDOW_UNITS
    next_seq: int = 0
    outbox: deque[_Waiting] = field(default_factory=deque)
    outbox_bytes: int = 0
    end_reason: str | None = None
    """Set: the stream ends when its outbox is empty."""


class ZmqSender:
    """See `base.Sender`. Made by `open_connector`."""

    def __init__(self, name: str, mailbox: Mailbox, on_failure: OnFailure) -> None:
        self._name = name
        self._mailbox = mailbox
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._parcels: dict[_Link, _Parcel] | None = None
        """What is gathered, while some thread sends together."""
        self._links: dict[str, _Link] = {}
        self._streams: dict[str, _Outgoing] = {}
        self._pool = SlotPool()
        self._probe_token = os.urandom(16)
        self._probe: PoolSegment | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<ZmqSender {self._name} links={len(self._links)} streams={len(self._streams)}>"

    def open(self, address: str, stream: str) -> None:
        with self._lock:
            if self._closed:
                return
            if stream in self._streams:
                raise ValueError(f"stream {stream!r} is open already")
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = self._connect(address)
            self._send_unsent_ends(link)
            outgoing = _Outgoing(stream, link)
            self._streams[stream] = link.streams[stream] = outgoing
            sent = self._post(link, wire.Open(self._mailbox.mailbox_id, stream))
        if not sent:
            self._fail_local(stream, f"the replica at {address} does not read its messages")

    def push(self, stream: str, payload: Buffer, meta: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            outgoing = self._streams.get(stream)
            if outgoing is None or outgoing.end_reason is not None:
                return  # failed, cancelled or ended: said once, by on_failure or the caller
            failure = self._push(outgoing, payload, meta or {})
        if failure:
            self._fail_local(stream, failure)

    @contextmanager
    def together(self) -> Iterator[None]:
        failed: set[str] = set()
        with self._lock:
            self._parcels = {}
            try:
                yield
            finally:
                parcels, self._parcels = self._parcels, None
                for link, parcel in parcels.items():
                    if not self._mailbox.post(link.peer, *parcel.parts):
                        failed |= self._streams.keys() & parcel.streams
                        if not link.peer.is_lost:
                            link.unsent_ends |= parcel.ends
        for stream in failed:
            self._fail_local(stream, "the receiving stage is gone or stuck")

    def end(self, stream: str, reason: str = "stop") -> None:
        with self._lock:
            outgoing = self._streams.get(stream)
            if outgoing is not None and outgoing.end_reason is None:
                outgoing.end_reason = reason
                self._end_if_empty(outgoing)

    def fail(self, stream: str, message: str) -> None:
        with self._lock:
            outgoing = self._streams.get(stream)
            if outgoing is not None:
                self._send_end(outgoing, "error", message)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for outgoing in list(self._streams.values()):
                self._send_end(outgoing, "error", f"stage {self._name} stopped")
            self._links.clear()
            self._pool.close()
            if self._probe is not None:
                os.close(self._probe.fd)

    # Called by the connector, in the mailbox's thread.

    def on_welcome(self, message: wire.Welcome) -> None:
        with self._lock:
            link = self._links.get(message.address)
            if link is not None:
                link.shares_memory = message.shares_memory

    def on_release(self, message: wire.Release, address: str) -> None:
        with self._lock:
            link = self._links.get(address)
            if link is None:
                return
            self._send_unsent_ends(link)
            self._free(link, message.slots)
            outgoing = link.streams.get(message.stream)
            if outgoing is not None:
                outgoing.credit += message.units
                self._pump(outgoing)

    def on_cancel(self, message: wire.Cancel, address: str) -> None:
        with self._lock:
            link = self._links.get(address)
            outgoing = link.streams.get(message.stream) if link is not None else None
            if outgoing is None:
                return
            self._forget(outgoing)
        self._on_failure(message.stream, message.message)

    def on_lost(self, peer: Peer) -> None:
        with self._lock:
            link = self._links.get(peer.address)
            if link is None or link.peer is not peer:
                return
            del self._links[peer.address]
            lost = list(link.streams)
            for outgoing in list(link.streams.values()):
                self._forget(outgoing)
            self._free(link, list(link.slots))
        for stream in lost:
            self._on_failure(stream, f"the replica at {peer.address} is gone")

    # The rest runs under the lock.

    def _connect(self, address: str) -> _Link:
        link = _Link(self._mailbox.connect(address))
        if address.startswith("ipc://") and self._probe is None:
            self._make_probe()
        hello = wire.Hello(
            self._mailbox.mailbox_id,
            wire.PROTOCOL_VERSION,
            self._name,
            self._mailbox.address,
            os.getpid(),
            self._probe.fd if address.startswith("ipc://") and self._probe is not None else -1,
            self._probe_token,
        )
        self._post(link, hello)
        return link

    def _make_probe(self) -> None:
        try:
            self._probe = create_segment(4096)
        except OSError as error:
            logger.warning("stage %s: no shared memory with others: %s", self._name, error)
            return
        self._probe.view[: len(self._probe_token)] = self._probe_token

    def _post(self, link: _Link, message: wire.Message, payload: Buffer | None = None) -> bool:
        header = wire.encode(message)
        raw = payload if payload is None or isinstance(payload, bytes) else bytes(payload)
        if self._parcels is None:
            return self._mailbox.post(link.peer, header, *(() if raw is None else (raw,)))
        parcel = self._parcels.setdefault(link, _Parcel())
        parcel.parts += (header, raw or b"")
        if isinstance(message, wire.Chunk | wire.Open):
            parcel.streams.add(message.stream)
        elif isinstance(message, wire.End):
            parcel.ends[message.stream] = message
        return True

    def _push(self, outgoing: _Outgoing, payload: Buffer, meta: Mapping[str, Any]) -> str:
        """Send or keep one frame; the reason when the stream has to fail instead."""
        size_bytes = memoryview(payload).nbytes
        if size_bytes > wire.MAX_PAYLOAD_BYTES:
            return f"a payload of {size_bytes} bytes is too large"
        waits = outgoing.credit <= 0 or bool(outgoing.outbox)
        if waits and (
            len(outgoing.outbox) >= MAX_OUTBOX_FRAMES
            or outgoing.outbox_bytes + size_bytes > MAX_OUTBOX_BYTES
        ):
            return "the receiving stage does not keep up: the outbox is full"
        slot = None
        if outgoing.link.shares_memory and size_bytes > MAX_INLINE_BYTES:
            slot = self._pool.put(payload)
        if slot is not None:
            outgoing.link.slots.add(slot.slot_id)
        if waits:
            kept = None if slot is not None else bytes(payload)
            outgoing.outbox.append(_Waiting(meta, size_bytes, kept, slot))
            outgoing.outbox_bytes += size_bytes
            return ""
        frame = _Waiting(meta, size_bytes, None if slot is not None else payload, slot)
        return "" if self._send(outgoing, frame) else "the receiving stage is gone or stuck"

    def _send(self, outgoing: _Outgoing, frame: _Waiting) -> bool:
        link, slot, mailbox_id = outgoing.link, frame.slot, self._mailbox.mailbox_id
        if slot is not None and slot.segment not in link.announced:
            segment = self._pool.segments[slot.segment]
            link.announced.add(slot.segment)
            self._post(link, wire.Segment(mailbox_id, slot.segment, segment.fd, segment.size_bytes))
        chunk = wire.Chunk(
            mailbox_id,
            outgoing.stream,
            outgoing.next_seq,
            dict(frame.meta),
            frame.size_bytes,
            *((slot.slot_id, slot.segment, slot.offset) if slot is not None else ()),
        )
        outgoing.next_seq += 1
        outgoing.credit -= wire.units_of(frame.size_bytes)
        return self._post(link, chunk, frame.payload)

    def _pump(self, outgoing: _Outgoing) -> None:
        while outgoing.outbox and outgoing.credit > 0:
            frame = outgoing.outbox.popleft()
            outgoing.outbox_bytes -= frame.size_bytes
            if not self._send(outgoing, frame):
                self._send_end(outgoing, "error", "the receiving stage is gone or stuck")
                return
        self._end_if_empty(outgoing)

    def _end_if_empty(self, outgoing: _Outgoing) -> None:
        if outgoing.end_reason is not None and not outgoing.outbox:
            self._send_end(outgoing, outgoing.end_reason, "")

    def _send_end(self, outgoing: _Outgoing, reason: str, message: str) -> None:
        end = wire.End(
            self._mailbox.mailbox_id, outgoing.stream, outgoing.next_seq, reason, message
        )
        link = outgoing.link
        if not self._post(link, end) and not link.peer.is_lost:
            link.unsent_ends[outgoing.stream] = end
        self._forget(outgoing)

    def _send_unsent_ends(self, link: _Link) -> None:
        for stream in list(link.unsent_ends):
            if not self._post(link, link.unsent_ends[stream]):
                return
            del link.unsent_ends[stream]

    def _forget(self, outgoing: _Outgoing) -> None:
        """The stream is over; slots that were sent come back by the receiver's releases."""
        del self._streams[outgoing.stream]
        del outgoing.link.streams[outgoing.stream]
        self._free(outgoing.link, [w.slot.slot_id for w in outgoing.outbox if w.slot is not None])
        outgoing.outbox.clear()

    def _free(self, link: _Link, slot_ids: list[int]) -> None:
        for slot_id in slot_ids:
            if slot_id in link.slots:
                link.slots.discard(slot_id)
                self._pool.free(slot_id)
            else:
                logger.error("%r: slot %d was released twice", self, slot_id)

    # Takes the lock itself.

    def _fail_local(self, stream: str, message: str) -> None:
        self.fail(stream, message)
        logger.warning("stage %s: stream %s failed: %s", self._name, stream, message)
        self._on_failure(stream, message)
