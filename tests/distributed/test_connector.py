"""Streams between two connectors: order, credit, ends, cancellation."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.distributed.sides import LARGE, Side, open_and_meet, round_trip
from vllm_omni.distributed.omni_connectors import sender as sender_module
from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.factory import open_connector
from vllm_omni.errors import ConfigError


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


def test_what_is_sent_together_arrives_before_anybody_is_woken(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    streams = [f"s{i}" for i in range(8)]
    seen: list[list[str]] = []
    arrived: list[str] = []
    woken = threading.Event()

    def on_arrival() -> None:
        seen.append(list(arrived))
        arrived.clear()
        woken.set()

    open_and_meet(thinker, voice, "meet")
    for stream in streams:
        voice.receiver.subscribe(stream, lambda frame: arrived.append(frame.stream), on_arrival)
        thinker.sender.open(voice.receiver.address, stream)
    voice.settle()  # frames that come before their subscription are handed over with it
    with thinker.sender.together():
        for i, stream in enumerate(streams):
            thinker.sender.push(stream, bytes(LARGE if i == 3 else i))
        thinker.sender.end("s5", "length")

    assert woken.wait(5)
    assert seen == [[*streams, "s5"]]


def test_a_bad_message_harms_nothing_that_it_travels_with(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    mailbox = thinker.connector._mailbox
    peer = mailbox.connect(voice.receiver.address)
    good = wire.encode(wire.Chunk(mailbox.mailbox_id, "s", 1, {}, 4))

    mailbox.post(peer, b"no message", b"", good, b"good", b"neither")

    assert bytes(voice.next().payload) == b"good"


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, LARGE, 9 * 1024 * 1024])
def test_payloads_of_every_size_arrive_whole(sides: tuple[Side, Side], size: int) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    payload = os.urandom(size)

    thinker.sender.push("s", payload)

    assert bytes(voice.next().payload) == payload


@pytest.mark.parametrize(("size", "number"), [(100, 400), (LARGE, 200)])
def test_the_sender_may_reuse_its_buffer_at_once(
    sides: tuple[Side, Side], size: int, number: int
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    buffer = bytearray(size)
    for i in range(number):  # far beyond the stream's credit
        buffer[:] = bytes([i % 256]) * size
        thinker.sender.push("s", buffer)

    for i in range(number):
        frame = voice.next()
        assert bytes(frame.payload) == bytes([i % 256]) * size
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


def test_an_unknown_kind_of_connector_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no connector 'zmp'; known: zmq"):
        open_connector("voice/0", "ipc:///nowhere", kind="zmp")
