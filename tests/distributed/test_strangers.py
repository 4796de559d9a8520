"""Who talks to a data plane without knowing its language harms nobody."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
import zmq

from tests.distributed.sides import Side, open_and_meet
from vllm_omni.distributed.omni_connectors import wire


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def still_speak(thinker: Side, voice: Side) -> None:
    thinker.sender.push("s", b"next")
    assert bytes(voice.next().payload) == b"next"


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, os.urandom(999)])
def test_noise_on_the_socket(sides: tuple[Side, Side], tmp_path: Path, noise: bytes) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    for name in ("a", "b"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / name))
            stranger.sendall(noise)

    still_speak(thinker, voice)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH, zmq.REQ])
def test_messages_of_a_stranger(sides: tuple[Side, Side], tmp_path: Path, kind: int) -> None:
    thinker, voice = sides
    open_and_meet(thinker, voice, "s")
    messages = [
        wire.Hello(7, wire.PROTOCOL_VERSION, "x", "nonsense://", 1, 3, b""),
        wire.Hello(7, wire.PROTOCOL_VERSION, "x", f"ipc://{tmp_path}/nobody", -5, 1 << 40, b"x"),
        wire.Hello(7, 99, "x", voice.receiver.address, 1, -1, b""),
        wire.Segment(7, -1, -1, -1),
        wire.Open(7, "s"),
        wire.Chunk(7, "s", -1, {}, -1, 5, 5, -5),
        wire.End(7, "s", 1, "stop"),
        wire.Release(7, "s", 1 << 40, [-1, 1 << 40]),
        wire.Cancel(7, "s", "mine"),
        wire.Welcome(7, "x", "y", True),
    ]
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.connect(voice.receiver.address)
        stranger.setsockopt(zmq.LINGER, 200)
        for message in messages if kind != zmq.REQ else messages[:1]:
            stranger.send_multipart([wire.encode(message), b"payload", b"more"])

        still_speak(thinker, voice)
    voice.settle()
    still_speak(thinker, voice)
