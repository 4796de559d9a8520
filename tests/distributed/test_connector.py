"""Streams between two connectors: order, credit, ends, and what happens when a side goes away."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from vllm_omni.distributed.omni_connectors import sender as sender_module
from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import open_connector
from vllm_omni.distributed.omni_connectors.zmq_connector import ZmqConnector
from vllm_omni.errors import ConfigError

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


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    """A sender's and a receiver's side that have not met yet."""
    thinker = Side("thinker/0", f"ipc://{tmp_path}/a")
    voice = Side("voice/0", f"ipc://{tmp_path}/b")
    yield thinker, voice
    thinker.connector.close()
    voice.connector.close()


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


def test_frames_arrive_in_order_with_their_meta_and_end(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    voice.subscribe("s")
    thinker.sender.open(voice.receiver.address, "s")
    for i in range(3):
        thinker.sender.push("s", bytes([i]), {"kind": "tokens", "i": i})
    thinker.sender.end("s", "length")

    frames = [voice.next() for _ in range(4)]

    assert [bytes(f.payload) for f in frames] == [b"\0", b"\1", b"\2", b""]
    assert [f.seq for f in frames] == [0, 1, 2, 3]
    assert frames[1].meta == {"kind": "tokens", "i": 1}
    assert [f.end for f in frames] == [None, None, None, "length"]


def test_frames_that_came_before_the_subscription_are_kept(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    thinker.sender.open(voice.receiver.address, "s")
    thinker.sender.push("s", b"early")
    thinker.sender.end("s")
    thinker.sender.open(voice.receiver.address, "later")
    voice.subscribe("later")
    thinker.sender.push("later", b"1")
    assert voice.next().stream == "later"  # so those of `s` have arrived too

    voice.subscribe("s")

    assert [voice.next().end for _ in range(2)] == [None, "stop"]


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, LARGE, 9 * 1024 * 1024])
def test_payloads_of_every_size_arrive_whole(sides: tuple[Side, Side], size: int) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    payload = os.urandom(size)

    thinker.sender.push("s", payload)

    assert bytes(voice.next().payload) == payload


def test_the_sender_may_reuse_its_buffer_at_once(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    buffer = bytearray(LARGE)
    for i in range(200):  # far beyond the stream's credit
        buffer[:] = bytes([i]) * LARGE
        thinker.sender.push("s", buffer)

    for i in range(200):
        frame = voice.next()
        assert bytes(frame.payload) == bytes([i]) * LARGE
        frame.release()


def test_slots_come_back_and_segments_are_reused(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    for _ in range(100):
        thinker.sender.push("s", bytes(LARGE))
        voice.next().release()
    round_trip(thinker, voice)

    assert repr(thinker.sender._pool) == "<SlotPool used=0 of 16>"


def test_without_release_frames_wait_at_the_sender(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    for i in range(wire.WINDOW_UNITS + 100):
        thinker.sender.push("s", b"%d" % i)
    thinker.sender.end("s")
    round_trip(thinker, voice)

    held = [voice.next() for _ in range(voice.frames.qsize())]
    assert len(held) <= wire.WINDOW_UNITS
    for frame in held:
        frame.release()
    seen = [int(bytes(f.payload)) for f in held]
    while (frame := voice.next()).end is None:
        seen.append(int(bytes(frame.payload)))
        frame.release()
    assert seen == list(range(wire.WINDOW_UNITS + 100))


def test_releasing_twice_gives_credit_once(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", bytes(LARGE))
    frame = voice.next()
    frame.release()
    frame.release()
    round_trip(thinker, voice)

    credit = thinker.sender._streams["s"].credit
    assert wire.WINDOW_UNITS - wire.units_of(LARGE) < credit <= wire.WINDOW_UNITS


def test_an_outbox_that_overflows_fails_its_stream_alone(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    monkeypatch.setattr(sender_module, "MAX_OUTBOX_FRAMES", 10)
    open_and_meet(thinker, voice, "slow")
    open_and_meet(thinker, voice, "s")
    for _ in range(wire.WINDOW_UNITS + 20):
        thinker.sender.push("slow", b"x")
    thinker.sender.push("s", b"still works")

    assert thinker.next_failure()[0] == "slow"
    found: dict[str, str | None] = {}
    while len(found) < 2:
        frame = voice.next()
        if frame.stream == "s" or frame.end is not None:
            found[frame.stream] = frame.end
    assert found == {"slow": "error", "s": None}


def test_a_failed_stream_says_why(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")

    thinker.sender.fail("s", "no more")
    thinker.sender.push("s", b"dropped")

    frame = voice.next()
    assert (frame.end, frame.error) == ("error", "no more")


def test_cancelling_tells_the_sender_and_drops_what_comes(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    voice.receiver.cancel("s")

    assert thinker.next_failure() == ("s", "cancelled by the receiving stage")
    thinker.sender.push("s", bytes(LARGE))
    thinker.sender.end("s")
    assert repr(thinker.sender).endswith("streams=0>")
    assert voice.frames.empty()


def test_a_stream_cancelled_before_it_opens_is_refused(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    voice.receiver.cancel("s")
    voice.settle()
    thinker.sender.open(voice.receiver.address, "s")

    assert thinker.next_failure()[0] == "s"


def test_slots_of_cancelled_streams_come_back(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "meet")
    for i in range(500):
        stream = f"s{i}"
        thinker.sender.open(voice.receiver.address, stream)
        thinker.sender.push(stream, bytes(LARGE))
        voice.receiver.cancel(stream)
        assert thinker.next_failure()[0] == stream
    round_trip(thinker, voice)

    assert "used=0" in repr(thinker.sender._pool)
    assert len(thinker.sender._pool.segments) == 1
    assert repr(voice.receiver) == "<ZmqReceiver voice/0 links=1 streams=1 unsubscribed=0>"


def test_a_receiver_that_goes_away_fails_the_streams_to_it(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", bytes(LARGE))
    voice.connector.close()

    stream, message = thinker.next_failure()
    assert (stream, "is gone" in message) == ("s", True)
    thinker.sender.push("s", b"dropped")
    assert "used=0" in repr(thinker.sender._pool)


def test_a_receiver_that_was_never_there_fails_the_stream(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    thinker, _ = sides
    thinker.sender.open(f"ipc://{tmp_path}/nobody", "s")

    assert thinker.next_failure()[0] == "s"


def test_a_sender_that_closes_fails_its_open_streams(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.connector.close()

    frame = voice.next()
    assert (frame.end, frame.error) == ("error", "stage thinker/0 stopped")


def test_what_ended_before_the_sender_closed_is_complete(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", b"last words")
    thinker.sender.end("s")
    thinker.connector.close()

    assert [bytes(voice.next().payload), voice.next().end] == [b"last words", "stop"]


def send_raw(thinker: Side, voice: Side, message: bytes) -> None:
    mailbox = thinker.connector._mailbox
    mailbox.post(mailbox.connect(voice.receiver.address), message)


@pytest.mark.parametrize(("seq", "what"), [(5, "gap"), (0, "repeated")])
def test_a_gap_or_a_repeated_frame_is_an_error_of_its_stream(
    sides: tuple[Side, Side], seq: int, what: str
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    chunk = wire.Chunk(thinker.connector._mailbox.mailbox_id, "s", seq, {}, 0)
    send_raw(thinker, voice, wire.encode(chunk))

    frame = voice.next()
    assert (frame.end, frame.error) == ("error", f"frame {seq} arrived where 1 was due")
    assert thinker.next_failure()[0] == "s"


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 40, msgspec.msgpack.encode(["chunk", 1]), msgspec.msgpack.encode(["new", 1])],
)
def test_an_unreadable_message_harms_nobody(
    sides: tuple[Side, Side], message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    with caplog.at_level(logging.CRITICAL):
        send_raw(thinker, voice, message)
        thinker.sender.push("s", b"next")

        assert bytes(voice.next().payload) == b"next"


def test_a_place_outside_the_segment_is_not_read(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", bytes(LARGE))
    voice.next().release()
    mailbox_id = thinker.connector._mailbox.mailbox_id
    chunk = wire.Chunk(mailbox_id, "s", 2, {}, LARGE, slot=0, segment=0, offset=1 << 40)
    send_raw(thinker, voice, wire.encode(chunk))

    assert voice.next().error == "a payload of stage thinker/0 is not readable"


def test_a_handler_that_raises_fails_its_stream_alone(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "good")

    def broken(frame: Frame) -> None:
        raise ValueError("not for me")

    voice.receiver.subscribe("bad", broken)
    thinker.sender.open(voice.receiver.address, "bad")
    thinker.sender.push("bad", b"x")
    thinker.sender.push("good", b"y")

    assert thinker.next_failure()[0] == "bad"
    assert bytes(voice.next().payload) == b"y"


def test_streams_that_nobody_takes_do_not_pile_up(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    monkeypatch.setattr(
        "vllm_omni.distributed.omni_connectors.receiver.MAX_UNSUBSCRIBED_STREAMS", 3
    )
    for i in range(5):
        thinker.sender.open(voice.receiver.address, f"s{i}")
        thinker.sender.push(f"s{i}", b"x")

    assert [thinker.next_failure()[0] for _ in range(2)] == ["s0", "s1"]


def test_across_hosts_payloads_travel_in_the_message(tmp_path: Path) -> None:
    thinker = Side("thinker/0", "tcp://127.0.0.1:*")
    voice = Side("voice/0", "tcp://127.0.0.1:*")
    open_and_meet(thinker, voice, "s")
    payload = os.urandom(5_000_000)
    thinker.sender.push("s", payload)
    thinker.sender.end("s")

    assert bytes(voice.next().payload) == payload
    assert voice.next().end == "stop"
    assert not thinker.sender._pool.segments
    voice.connector.close()
    thinker.connector.close()


def test_closing_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    def one_life() -> None:
        thinker = Side("thinker/0", f"ipc://{tmp_path}/a")
        voice = Side("voice/0", f"ipc://{tmp_path}/b")
        open_and_meet(thinker, voice, "s")
        thinker.sender.push("s", bytes(LARGE))
        voice.next().release()
        thinker.connector.close()
        voice.connector.close()

    one_life()
    gc.collect()
    threads, files = threading.active_count(), os.listdir("/proc/self/fd")
    shared = os.listdir("/dev/shm")
    for _ in range(5):
        one_life()
    gc.collect()

    assert threading.active_count() == threads
    assert os.listdir("/proc/self/fd") == files
    assert os.listdir("/dev/shm") == shared


def test_an_unknown_kind_of_connector_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no connector 'zmp'; known: zmq"):
        open_connector("voice/0", "ipc:///nowhere", kind="zmp")
