"""Shared memory, descriptors or room in a queue that lack: inline or an error, never a wait."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.distributed.sides import LARGE, Side, open_and_meet, round_trip
from vllm_omni.distributed.omni_connectors import receiver, shared_memory, wire
from vllm_omni.distributed.omni_connectors.mailbox import Mailbox, Peer

PAYLOAD = bytes(range(250)) * (LARGE // 250)


def refuse(*args: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_memfd_everything_travels_in_messages(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    for _ in range(3):
        thinker.sender.push("s", PAYLOAD)
        frame = voice.next()
        assert bytes(frame.payload) == PAYLOAD
        frame.release()
    thinker.sender.end("s")

    assert voice.next().end == "stop"
    assert repr(thinker.sender._pool) == "<SlotPool used=0 of 0>"


def test_a_pool_that_cannot_grow_falls_back_and_grows_later(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    gc.collect()  # what the tests before left is closed
    with monkeypatch.context() as context:
        context.setattr(shared_memory.mmap, "mmap", refuse)
        files = set(os.listdir("/proc/self/fd"))
        thinker.sender.push("s", PAYLOAD)
        assert bytes(voice.next().payload) == PAYLOAD
        # Sockets of earlier tests may close meanwhile, in threads of their own.
        assert set(os.listdir("/proc/self/fd")) <= files
    thinker.sender.push("s", PAYLOAD)

    assert bytes(voice.next().payload) == PAYLOAD
    assert "used=1" in repr(thinker.sender._pool)


_LIMITED = """
import resource, sys
from tests.distributed.sides import LARGE, Side, open_and_meet
thinker, voice = Side("thinker/0", "ipc://" + sys.argv[1]), Side("voice/0", "ipc://" + sys.argv[2])
open_and_meet(thinker, voice, "s")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
thinker.sender.push("s", b"x" * LARGE)
assert bytes(voice.next().payload) == b"x" * LARGE
thinker.sender.end("s")
assert voice.next().end == "stop"
print(thinker.sender._pool)
"""


def test_a_limit_of_the_kernel_is_no_death(tmp_path: Path) -> None:
    """The limit refuses a segment as a full /dev/shm refuses a file."""
    arguments = [str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert done.stdout == "<SlotPool used=0 of 0>\n"
    assert "no shared memory, payloads travel in messages" in done.stderr


def test_a_segment_that_the_receiver_cannot_open_costs_the_streams_under_way(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    monkeypatch.setattr(receiver, "open_segment", refuse)
    thinker.sender.push("s", PAYLOAD)
    failed = voice.next()
    assert (failed.end, failed.error) == (
        "broken",
        "a payload of stage thinker/0 is not readable",
    )
    assert thinker.next_failure()[0] == "s"

    round_trip(thinker, voice)
    voice.subscribe("next")
    thinker.sender.open(voice.receiver.address, "next")
    thinker.sender.push("next", PAYLOAD)
    assert bytes(voice.next().payload) == PAYLOAD
    assert "used=0" in repr(thinker.sender._pool)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sender_that_cannot_be_answered_fails_its_stream_and_not_its_next(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    thinker, voice = sides

    def refuse_peer(address: str) -> Peer:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as context:
        context.setattr(voice.connector._mailbox, "connect", refuse_peer)
        voice.subscribe("s")
        voice.settle()
        thinker.sender.open(voice.receiver.address, "s")
        failed = voice.next()
    assert (failed.end, failed.error) == (
        "broken",
        "stage thinker/0 cannot be answered: Too many open files",
    )

    open_and_meet(thinker, voice, "next")


def test_an_end_that_finds_the_queue_full_arrives_later(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    post = Mailbox.post

    def full(self: Mailbox, peer: Peer, header: bytes, payload: bytes | None = None) -> bool:
        is_end = isinstance(wire.decode(header), wire.End)
        return not is_end and post(self, peer, header, payload)

    with monkeypatch.context() as context:
        context.setattr(Mailbox, "post", full)
        thinker.sender.end("s", "length")
    thinker.sender.open(voice.receiver.address, "next")

    assert voice.next().end == "length"
