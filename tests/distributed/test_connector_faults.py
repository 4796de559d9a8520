"""What a stream's other end is told when a side goes away or talks nonsense."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from tests.distributed.sides import LARGE, Side, open_and_meet, round_trip
from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.mailbox import Mailbox


def test_a_receiver_that_goes_away_fails_the_streams_to_it(sides: tuple[Side, Side]) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", bytes(LARGE))
    voice.connector.close()

    stream, message = thinker.next_failure()
    assert (stream, "is gone" in message) == ("s", True)
    thinker.sender.push("s", b"dropped")
    assert "used=0" in repr(thinker.sender._pool)


_RECEIVER = """
import signal, sys
from vllm_omni.distributed.omni_connectors.factory import open_connector
connector = open_connector("voice/0", sys.argv[1])
connector.receiver.subscribe("s", lambda frame: print("frame", flush=True))
print("ready", flush=True)
signal.pause()
"""


def test_a_receiver_that_is_killed_fails_the_streams_at_once(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    thinker, _ = sides
    address = f"ipc://{tmp_path}/killed"
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, address], stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        thinker.sender.open(address, "s")
        for _ in range(10):  # more than the receiver reads, it never releases
            thinker.sender.push("s", bytes(2_000_000))
        assert receiver.stdout.readline() == b"frame\n"
        receiver.kill()
        begin = time.monotonic()
        assert thinker.next_failure() == ("s", f"the replica at {address} is gone")
        assert time.monotonic() - begin < 0.5

    assert "used=0" in repr(thinker.sender._pool)
    assert repr(thinker.sender).endswith("links=0 streams=0>")


def test_a_receiver_that_is_killed_before_it_takes_the_connection(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    thinker, _ = sides
    address = f"ipc://{tmp_path}/stopped"
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, address], stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        receiver.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, receiver.pid, os.WSTOPPED)
        thinker.sender.open(address, "s")
        thinker.sender.push("s", bytes(LARGE))
        receiver.kill()
        assert thinker.next_failure() == ("s", f"the replica at {address} is gone")

    begin = time.monotonic()
    thinker.connector.close()
    assert time.monotonic() - begin < 3.0


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
    assert (frame.end, frame.error) == ("broken", f"frame {seq} arrived where 1 was due")
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


def test_a_slot_released_twice_is_free_once(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    thinker.sender.push("s", bytes(LARGE))
    voice.next().release()
    again = wire.Release(voice.connector._mailbox.mailbox_id, "s", 0, [0])
    with caplog.at_level(logging.CRITICAL):
        send_raw(voice, thinker, wire.encode(again))
        round_trip(thinker, voice)

    assert "used=0" in repr(thinker.sender._pool)


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


def test_together_into_a_full_queue_fails_what_runs_and_keeps_the_ends(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "ends")
    open_and_meet(thinker, voice, "runs")
    with monkeypatch.context() as full:
        full.setattr(Mailbox, "post", lambda mailbox, peer, *parts: False)
        with thinker.sender.together():
            thinker.sender.end("ends")
            thinker.sender.push("runs", b"x")
    thinker.sender.open(voice.receiver.address, "later")  # the link is heard of again

    assert thinker.next_failure() == ("runs", "the receiving stage is gone or stuck")
    frames = [voice.next() for _ in range(2)]
    assert {frame.stream: frame.end for frame in frames} == {"ends": "stop", "runs": "broken"}
