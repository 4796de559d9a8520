"""The receiving half of the ZeroMQ connector: order, held frames, credit, loss of senders.

All streams live in the mailbox's thread; only the release of a frame may come from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.mailbox import Mailbox, Peer
from vllm_omni.distributed.omni_connectors.shared_memory import open_segment

logger = logging.getLogger(__name__)

MAX_UNSUBSCRIBED_STREAMS = 1024
MAX_UNSUBSCRIBED_BYTES = 64 * 1024 * 1024
_MAX_CANCELLED = 4096
"""Stream ids remembered so that frames still on their way are dropped in silence."""
_MAX_UNANSWERED = 64
_RELEASE_UNITS = wire.WINDOW_UNITS // 4
"""Credit collected before it goes back in a message of its own."""

OnFrame = Callable[[Frame], None]
OnArrival = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Link:
    """One sender's mailbox."""

    peer: Peer
    name: str
    pid: int
    shares_memory: bool
    segments: dict[int, memoryview] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    credit: dict[str, int] = field(default_factory=dict)
    """Released and not yet given back, by stream; a stream that is over has no entry."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """One stream: subscribed, opened by its sender, or both."""

    link: _Link | None = None
    on_frame: OnFrame | None = None
    on_arrival: OnArrival | None = None
    next_seq: int = 0
    held: deque[Frame] = field(default_factory=deque)
    held_bytes: int = 0
    is_over: bool = False
    """Its last frame is among the held ones."""


class _Release:
    """Gives one frame back; only the first call counts."""

    __slots__ = ("_done", "_link", "_receiver", "_slot", "_stream", "_units")

    def __init__(self, receiver: ZmqReceiver, link: _Link, chunk: wire.Chunk) -> None:
        self._receiver, self._link, self._stream = receiver, link, chunk.stream
        self._units, self._slot = wire.units_of(chunk.size_bytes), chunk.slot
        self._done = False

    def __call__(self) -> None:
        if not self._done:
            self._done = True
            self._receiver.give_back(self._link, self._stream, self._units, self._slot)


class ZmqReceiver:
    """See `base.Receiver`. Made by `open_connector`."""

    def __init__(self, name: str, mailbox: Mailbox) -> None:
        self.address = mailbox.address
        self._name = name
        self._mailbox = mailbox
        self._links: dict[int, _Link] = {}
        self._unanswered: OrderedDict[int, wire.Hello] = OrderedDict()
        """Senders whose mailboxes could not be connected to when they came."""
        self._streams: dict[str, _Incoming] = {}
        self._unsubscribed: OrderedDict[str, _Incoming] = OrderedDict()
        self._unsubscribed_bytes = 0
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._to_tell: dict[OnArrival, None] = {}
        """Who was handed frames of what arrives just now."""

    def __repr__(self) -> str:
        return (
            f"<ZmqReceiver {self._name} links={len(self._links)} streams={len(self._streams)} "
            f"unsubscribed={len(self._unsubscribed)}>"
        )

    def subscribe(
        self, stream: str, on_frame: OnFrame, on_arrival: OnArrival | None = None
    ) -> None:
        self._mailbox.call_soon(lambda: self._subscribe(stream, on_frame, on_arrival))

    def cancel(self, stream: str) -> None:
        self._mailbox.call_soon(lambda: self._cancel(stream, "cancelled by the receiving stage"))

    def close(self) -> None:
        """Nothing of its own to give back: mappings fall with the frames that use them."""

    def give_back(self, link: _Link, stream: str, units: int, slot: int) -> None:
        """A frame was read. Any thread."""
        with link.lock:
            pending = link.credit.get(stream)
            if pending is not None:
                pending += units
                if slot < 0 and pending < _RELEASE_UNITS:
                    link.credit[stream] = pending
                    return
                link.credit[stream] = 0
            elif slot < 0:
                return
            slots = [slot] if slot >= 0 else []
            message = wire.Release(self._mailbox.mailbox_id, stream, pending or 0, slots)
            self._mailbox.post(link.peer, wire.encode(message))

    # Called by the connector, in the mailbox's thread; so is everything below.

    def on_hello(self, hello: wire.Hello) -> None:
        if hello.version != wire.PROTOCOL_VERSION:
            logger.error("stage %s speaks version %d of the data plane", hello.name, hello.version)
            return
        shares_memory = self._sees_memory_of(hello)
        self._unanswered[hello.mailbox] = hello
        while len(self._unanswered) > _MAX_UNANSWERED:
            self._unanswered.popitem(last=False)
        peer = self._mailbox.connect(hello.address)  # raises without descriptors
        del self._unanswered[hello.mailbox]
        link = self._links[hello.mailbox] = _Link(peer, hello.name, hello.pid, shares_memory)
        self._welcome(link)

    def _welcome(self, link: _Link) -> None:
        welcome = wire.Welcome(
            self._mailbox.mailbox_id, self._name, self._mailbox.address, link.shares_memory
        )
        self._mailbox.post(link.peer, wire.encode(welcome))

    def on_segment(self, message: wire.Segment) -> None:
        link = self._links.get(message.mailbox)
        if link is None or not link.shares_memory:
            return
        try:
            link.segments[message.segment] = open_segment(link.pid, message.fd, message.size_bytes)
        except (OSError, ValueError) as error:
            logger.error("shared memory of stage %s cannot be opened: %s", link.name, error)
            # What is under way fails its streams; what comes later travels in the messages.
            link.shares_memory = False
            self._welcome(link)

    def on_open(self, message: wire.Open) -> None:
        link = self._links.get(message.mailbox) or self._met_again(message)
        if link is None:
            return
        if message.stream in self._cancelled:
            self._tell_cancelled(link, message.stream, "cancelled by the receiving stage")
            return
        incoming = self._streams.get(message.stream)
        if incoming is None:
            incoming = self._streams[message.stream] = _Incoming()
            self._unsubscribed[message.stream] = incoming
        elif incoming.link is not None and incoming.link is not link:
            self._tell_cancelled(link, message.stream, "the stream has another sender")
            return
        elif incoming.link is not None:
            self._fail(message.stream, incoming, "the stream was opened twice")
            return
        incoming.link = link
        with link.lock:
            link.credit[message.stream] = 0
        self._bound_unsubscribed()

    def _met_again(self, message: wire.Open) -> _Link | None:
        """The link of a sender that could not be answered when it came; else its stream fails."""
        hello = self._unanswered.get(message.mailbox)
        if hello is None:
            return None
        try:
            self.on_hello(hello)
        except zmq.ZMQError as error:
            incoming = self._streams.get(message.stream)
            if incoming is not None and incoming.link is None and not incoming.is_over:
                text = f"stage {hello.name} cannot be answered: {error}"
                self._end(message.stream, incoming, "broken", text)
            return None
        return self._links[hello.mailbox]

    def on_chunk(self, chunk: wire.Chunk, raw: memoryview | None) -> None:
        link = self._links.get(chunk.mailbox)
        if link is None:
            return
        release = _Release(self, link, chunk)
        incoming = self._streams.get(chunk.stream)
        if incoming is None or incoming.link is not link or incoming.is_over:
            release()  # cancelled, failed or never opened
            return
        if chunk.seq != incoming.next_seq:
            release()
            self._fail_order(chunk.stream, incoming, chunk.seq)
            return
        payload = self._payload(link, chunk, raw)
        if payload is None:
            release()
            self._fail(chunk.stream, incoming, f"a payload of stage {link.name} is not readable")
            return
        incoming.next_seq += 1
        frame = Frame(chunk.stream, chunk.seq, chunk.meta, payload, release=release)
        self._deliver(chunk.stream, incoming, frame)

    def on_end(self, end: wire.End) -> None:
        incoming = self._streams.get(end.stream)
        if incoming is None or incoming.link is None or incoming.is_over:
            return
        if incoming.link is not self._links.get(end.mailbox):
            return
        if end.seq != incoming.next_seq:
            self._fail_order(end.stream, incoming, end.seq)
            return
        self._end(end.stream, incoming, end.reason, end.message)

    def on_lost(self, peer: Peer) -> None:
        for mailbox_id, link in list(self._links.items()):
            if link.peer is peer:
                del self._links[mailbox_id]
                self._lose(link)

    def _lose(self, link: _Link) -> None:
        for stream, incoming in list(self._streams.items()):
            if incoming.link is link and not incoming.is_over:
                self._end(stream, incoming, "lost", f"stage {link.name} is gone")

    def _sees_memory_of(self, hello: wire.Hello) -> bool:
        if hello.probe_fd < 0 or not self.address.startswith("ipc://"):
            return False
        try:
            probe = open_segment(hello.pid, hello.probe_fd, len(hello.token))
        except (OSError, ValueError) as error:
            logger.info("no shared memory with stage %s: %s", hello.name, error)
            return False
        return probe.tobytes() == hello.token

    def _payload(self, link: _Link, chunk: wire.Chunk, raw: memoryview | None) -> memoryview | None:
        if chunk.slot < 0:
            found = raw if raw is not None else memoryview(b"")
        else:
            segment = link.segments.get(chunk.segment)
            if segment is None or chunk.offset < 0:
                return None
            found = segment[chunk.offset : chunk.offset + chunk.size_bytes]
        return found if found.nbytes == chunk.size_bytes else None

    def tell_arrivals(self) -> None:
        """Wake who was handed frames."""
        to_tell, self._to_tell = self._to_tell, {}
        for on_arrival in to_tell:
            on_arrival()

    def _subscribe(self, stream: str, on_frame: OnFrame, on_arrival: OnArrival | None) -> None:
        incoming = self._streams.get(stream)
        if incoming is None:
            self._streams[stream] = _Incoming(on_frame=on_frame, on_arrival=on_arrival)
            return
        incoming.on_frame, incoming.on_arrival = on_frame, on_arrival
        self._drop_unsubscribed(stream)
        while incoming.held:
            self._hand_over(stream, incoming, incoming.held.popleft())
        if incoming.is_over:
            self._forget(stream, incoming)
        self.tell_arrivals()

    def _deliver(self, stream: str, incoming: _Incoming, frame: Frame) -> None:
        if incoming.on_frame is not None:
            self._hand_over(stream, incoming, frame)
            return
        incoming.held.append(frame)
        incoming.held_bytes += frame.payload.nbytes
        self._unsubscribed_bytes += frame.payload.nbytes
        self._bound_unsubscribed()

    def _hand_over(self, stream: str, incoming: _Incoming, frame: Frame) -> None:
        assert incoming.on_frame is not None
        if incoming.on_arrival is not None:
            self._to_tell[incoming.on_arrival] = None
        try:
            incoming.on_frame(frame)
        except Exception:  # the boundary of one stream: the others go on
            logger.exception("stage %s: a frame of stream %s was not taken", self._name, stream)
            frame.release()
            self._cancel(stream, "the receiving stage could not take a frame")

    def _end(self, stream: str, incoming: _Incoming, reason: str, message: str) -> None:
        incoming.is_over = True
        last = Frame(stream, incoming.next_seq, end=reason, error=message)
        self._deliver(stream, incoming, last)
        if incoming.on_frame is not None:
            self._forget(stream, incoming)

    def _fail_order(self, stream: str, incoming: _Incoming, seq: int) -> None:
        self._fail(stream, incoming, f"frame {seq} arrived where {incoming.next_seq} was due")

    def _fail(self, stream: str, incoming: _Incoming, message: str) -> None:
        if incoming.link is not None:
            self._tell_cancelled(incoming.link, stream, message)
        self._remember_cancelled(stream)
        self._end(stream, incoming, "broken", message)

    def _cancel(self, stream: str, message: str) -> None:
        incoming = self._streams.get(stream)
        if incoming is None or not incoming.is_over:
            self._remember_cancelled(stream)
        if incoming is None:
            return
        for frame in incoming.held:
            frame.release()
        if incoming.link is not None and not incoming.is_over:
            self._tell_cancelled(incoming.link, stream, message)
        self._drop_unsubscribed(stream)
        self._forget(stream, incoming)

    def _forget(self, stream: str, incoming: _Incoming) -> None:
        if self._streams.pop(stream, None) is not None and incoming.link is not None:
            with incoming.link.lock:
                incoming.link.credit.pop(stream, None)

    def _drop_unsubscribed(self, stream: str) -> None:
        incoming = self._unsubscribed.pop(stream, None)
        if incoming is not None:
            self._unsubscribed_bytes -= incoming.held_bytes
            incoming.held_bytes = 0

    def _bound_unsubscribed(self) -> None:
        """Streams that nobody asked for do not pile up: the oldest go."""
        while (
            len(self._unsubscribed) > MAX_UNSUBSCRIBED_STREAMS
            or self._unsubscribed_bytes > MAX_UNSUBSCRIBED_BYTES
        ):
            self._cancel(next(iter(self._unsubscribed)), "nobody took this stream")

    def _tell_cancelled(self, link: _Link, stream: str, message: str) -> None:
        cancel = wire.Cancel(self._mailbox.mailbox_id, stream, message)
        self._mailbox.post(link.peer, wire.encode(cancel))

    def _remember_cancelled(self, stream: str) -> None:
        self._cancelled[stream] = None
        while len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)
