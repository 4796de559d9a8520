"""Two replicas' data planes for the tests of the connector."""

from __future__ import annotations

import queue
import threading

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import open_connector
from vllm_omni.distributed.omni_connectors.zmq_connector import ZmqConnector

LARGE = 300_000
"""Bytes of a payload that goes through shared memory."""


class Side:
    """One replica's data plane, and what it has been told."""

    def __init__(self, name: str, bind: str) -> None:
        self.failures: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        connector = open_connector(name, bind, on_failure=self._on_failure)
        assert isinstance(connector, ZmqConnector)
        self.connector = connector
        self.sender = connector.sender
        self.receiver = connector.receiver

    def _on_failure(self, stream: str, message: str) -> None:
        self.failures.put((stream, message))

    def subscribe(self, stream: str) -> None:
        self.receiver.subscribe(stream, self.frames.put)

    def next(self) -> Frame:
        return self.frames.get(timeout=5)

    def next_failure(self) -> tuple[str, str]:
        return self.failures.get(timeout=5)

    def settle(self) -> None:
        """Everything handed to the connector's thread so far has been done."""
        done = threading.Event()
        self.connector._mailbox.call_soon(done.set)
        assert done.wait(5)


def open_and_meet(thinker: Side, voice: Side, stream: str) -> None:
    """Open a stream and wait until both sides know what they share."""
    voice.subscribe(stream)
    thinker.sender.open(voice.receiver.address, stream)
    thinker.sender.push(stream, b"hello")
    voice.next().release()
    round_trip(thinker, voice)


def round_trip(thinker: Side, voice: Side) -> None:
    """Messages of both directions sent so far have been read."""
    thinker.sender.open(voice.receiver.address, "round-trip")
    voice.settle()
    voice.receiver.cancel("round-trip")
    assert thinker.next_failure()[0] == "round-trip"
