"""The ZeroMQ connector: one mailbox that serves a sender, a receiver, or both.

On one host it is reached by ipc:// and large payloads go through shared memory; on others by
tcp://, with every payload in the message.
"""

from __future__ import annotations

import logging

import msgspec

from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.mailbox import Mailbox, Peer
from vllm_omni.distributed.omni_connectors.receiver import ZmqReceiver
from vllm_omni.distributed.omni_connectors.sender import OnFailure, ZmqSender

logger = logging.getLogger(__name__)


class ZmqConnector:
    """See `factory.Connector`."""

    def __init__(self, name: str, bind: str, on_failure: OnFailure) -> None:
        self._addresses: dict[int, str] = {}
        """Of receivers' mailboxes, by their identity."""
        self._mailbox = Mailbox(name, bind, self)
        self.address = self._mailbox.address
        self.sender = ZmqSender(name, self._mailbox, on_failure)
        self.receiver = ZmqReceiver(name, self._mailbox)
        self._mailbox.start()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._mailbox.close()

    def on_message(self, header: bytes | memoryview, payload: memoryview | None) -> None:
        try:
            message = wire.decode(header)
        except msgspec.DecodeError as error:
            logger.error("%r: a message is not readable: %s", self._mailbox, error)
            return
        match message:
            case wire.Chunk():
                self.receiver.on_chunk(message, payload)
            case wire.Release():
                self.sender.on_release(message, self._addresses.get(message.mailbox, ""))
            case wire.End():
                self.receiver.on_end(message)
            case wire.Open():
                self.receiver.on_open(message)
            case wire.Segment():
                self.receiver.on_segment(message)
            case wire.Cancel():
                self.sender.on_cancel(message, self._addresses.get(message.mailbox, ""))
            case wire.Hello():
                self.receiver.on_hello(message)
            case wire.Welcome():
                self._addresses[message.mailbox] = message.address
                self.sender.on_welcome(message)

    def on_arrived(self) -> None:
        self.receiver.tell_arrivals()

    def on_lost(self, peer: Peer) -> None:
        self._addresses = {i: a for i, a in self._addresses.items() if a != peer.address}
        self.sender.on_lost(peer)
        self.receiver.on_lost(peer)
        self.receiver.tell_arrivals()
