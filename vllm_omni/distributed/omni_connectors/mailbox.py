"""A mailbox: one bound ZeroMQ PULL socket, one PUSH socket per peer, one thread.

Any thread may post to a peer and returns at once. Arriving messages, lost peers and calls handed
to the thread are handled one after the other in the mailbox's thread, which sleeps in the kernel
while there is nothing to do. A peer that goes away is noticed by its connection, not by a time-out;
over TCP ZeroMQ's heartbeats notice a silent host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_omni.distributed.omni_connectors.wire import MAX_PAYLOAD_BYTES

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 65536
"""Messages a peer may leave unread before it counts as stuck."""
_BATCH = 256
"""Messages handled before the thread looks at its other sockets."""
_LOSS_GRACE_S = 0.05
"""Time for what a lost peer sent before it went to arrive through the other connection."""
_TCP_HEARTBEAT_MS = 5000
_CLOSE_LINGER_MS = 500
_CLOSE_TIMEOUT_S = 2.0
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class MailboxHandler(Protocol):
    """Who reads the mail. Called in the mailbox's thread only."""

    def on_message(self, header: bytes | memoryview, payload: memoryview | None) -> None: ...

    def on_arrived(self) -> None:
        """All that came together was handed over by `on_message`."""

    def on_lost(self, peer: Peer) -> None: ...


@dataclass(slots=True, eq=False)
class Peer:
    """A mailbox that this one posts to."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    is_lost: bool = False


class Mailbox:
    """See the module. `handler.on_message` never overlaps with itself."""

    def __init__(self, name: str, bind: str, handler: MailboxHandler) -> None:
        self.mailbox_id = secrets.randbits(63)
        self._handler = handler
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._inbox.bind(bind)
        self.address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._losing: list[tuple[float, Peer]] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"mailbox {name}", daemon=True)

    def __repr__(self) -> str:
        return f"<Mailbox {self.address} peers={len(self._peers)}>"

    def start(self) -> None:
        """Begin to hand messages to the handler."""
        self._thread.start()

    def connect(self, address: str) -> Peer:
        """The peer at this address; connects when it is new. Returns before it is reached."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = self._connect(address)
                self.call_soon(lambda: self._watch(peer))
            return peer

    def post(self, peer: Peer, *parts: bytes) -> bool:
        """Send a message; False when the peer is lost or stuck.

        `parts` are a header, a header and its payload, or several such pairs that go together.
        """
        with self._lock:
            if peer.is_lost or self._closing:
                return False
            try:
                peer.socket.send_multipart(parts, zmq.NOBLOCK, copy=max(map(len, parts)) < 65536)
            except zmq.ZMQError as error:
                if not isinstance(error, zmq.Again):
                    logger.error("%r: not sent to %s: %s", self, peer.address, error)
                return False
            return True

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run a call in the mailbox's thread."""
        self._calls.append(call)
        self._wake()

    def close(self) -> None:
        """Stop the thread and give everything back; what was posted may still leave for a moment.
        Repeatable; not from the mailbox's own thread."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)
        # libzmq may wait for ever for a peer that died before it took the connection.
        ending = threading.Thread(
            target=self._context.destroy, args=(_CLOSE_LINGER_MS,), name="mailbox end", daemon=True
        )
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        if ending.is_alive():
            logger.error("%r: its sockets did not close in time", self)

    def _connect(self, address: str) -> Peer:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a broken connection is a lost peer
        if address.startswith("tcp://"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_MS)
        try:
            monitor = socket.get_monitor_socket(_GONE)
        except zmq.ZMQError:
            socket.close(0)
            raise
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise
        return Peer(address, socket, monitor)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is about to wake up anyway
            os.eventfd_write(self._wake_fd, 1)

    # The rest runs in the mailbox's thread.

    def _run(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        while not self._closing:
            for source, _ in self._poller.poll(self._poll_timeout_ms()):
                if source is self._inbox:
                    self._read_inbox(_BATCH)
                elif source == self._wake_fd:
                    self._run_calls()
                else:
                    self._guarded(lambda: self._on_monitor(source))  # noqa: B023
            self._forget_lost()

    def _poll_timeout_ms(self) -> int | None:
        if not self._losing:
            return None
        return max(0, round((self._losing[0][0] - time.monotonic()) * 1000) + 1)

    def _read_inbox(self, most: int) -> None:
        for _ in range(most):
            try:
                header: bytes | memoryview = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            rest: list[memoryview] = []
            while self._inbox.getsockopt(zmq.RCVMORE):
                rest.append(self._inbox.recv(copy=False).buffer)
            self._read_parts(header, rest)

    def _read_parts(self, header: bytes | memoryview, rest: list[memoryview]) -> None:
        """Hand over a message: the one that it is, or the pairs that came together."""
        payload = rest[0] if rest else None
        self._guarded(lambda: self._handler.on_message(header, payload))
        for one, more in zip(rest[1::2], rest[2::2], strict=False):
            self._guarded(lambda: self._handler.on_message(one, more))  # noqa: B023
        self._guarded(self._handler.on_arrived)

    def _run_calls(self) -> None:
        os.eventfd_read(self._wake_fd)
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # one bad message must not stop everyone's data plane
            logger.exception("a message of the data plane could not be handled")

    def _watch(self, peer: Peer) -> None:
        self._poller.register(peer.monitor, zmq.POLLIN)

    def _on_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        self._poller.unregister(monitor)  # first: a monitor that cannot be read is read once
        peer = next(p for p in self._peers.values() if p.monitor is monitor)
        event = parse_monitor_message(monitor.recv_multipart())
        logger.debug("peer %s is gone: event %s", peer.address, event["event"])
        with self._lock:
            peer.is_lost = True
            del self._peers[peer.address]
            peer.socket.disable_monitor()
            peer.socket.close(0)
            peer.monitor.close(0)
        self._losing.append((time.monotonic() + _LOSS_GRACE_S, peer))

    def _forget_lost(self) -> None:
        while self._losing and self._losing[0][0] <= time.monotonic():
            _, peer = self._losing.pop(0)
            self._read_inbox(MAX_QUEUED_MESSAGES)
            self._guarded(lambda: self._handler.on_lost(peer))  # noqa: B023
