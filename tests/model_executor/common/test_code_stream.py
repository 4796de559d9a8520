"""Codes on their way into a vocoder."""

from typing import Any

import numpy as np
import pytest

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.common.code_stream import (
    END_OF_CODES,
    Chunk,
    ChunkRamp,
    CodeBuffer,
    CodeFrames,
)

RAMP = ChunkRamp((1, 2, 4))


def frames(first: int, number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Frames of two groups that can be told from each other."""
    return np.arange(2 * first, 2 * (first + number), dtype=np.int32).reshape(-1, 2)


def taken(chunks: list[Chunk]) -> list[list[int]]:
    """The first group of every chunk's codes."""
    return [(chunk.codes[:, 0] // 2).tolist() for chunk in chunks]


def spoken(total: int, ramp: ChunkRamp, lookahead: int = 0) -> list[Chunk]:
    """All chunks of frames that come one by one."""
    buffer, chunks = CodeBuffer(), []
    for i in range(total):
        new, buffer = buffer.take(frames(i, 1), ramp, lookahead)
        chunks += new
    new, buffer = buffer.take(END_OF_CODES, ramp, lookahead)
    assert not len(buffer.pending)
    return chunks + new


def test_chunks_follow_the_ramp_and_its_last_number_stays() -> None:
    assert taken(spoken(12, RAMP)) == [[0], [1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11]]


def test_frames_wait_until_their_chunk_is_full() -> None:
    chunks, buffer = CodeBuffer().take(frames(0, 1), ChunkRamp((3,)))
    assert chunks == []
    chunks, buffer = buffer.take(frames(1, 1), ChunkRamp((3,)))
    assert chunks == []
    chunks, buffer = buffer.take(frames(2, 1), ChunkRamp((3,)))
    assert taken(chunks) == [[0, 1, 2]]


def test_many_frames_at_once_become_several_chunks() -> None:
    chunks, buffer = CodeBuffer().take(frames(0, 9), RAMP)
    assert taken(chunks) == [[0], [1, 2], [3, 4, 5, 6]]
    assert len(buffer.pending) == 2


def test_the_end_takes_what_is_there_and_keeps_the_size_it_was_to_have() -> None:
    (*_, last) = spoken(9, RAMP)
    assert (last.num_new, last.size, last.is_last) == (2, 4, True)


def test_an_empty_stream_makes_no_chunk() -> None:
    assert spoken(0, RAMP) == []


def test_a_chunk_waits_for_the_frames_it_looks_at() -> None:
    chunks = spoken(7, ChunkRamp((2,)), lookahead=3)
    assert taken(chunks) == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6], [6]]
    assert [chunk.num_new for chunk in chunks] == [2, 2, 2, 1]
    assert [chunk.is_last for chunk in chunks] == [False, False, False, True]


def test_an_input_that_is_taken_again_gives_the_same() -> None:
    _, buffer = CodeBuffer().take(frames(0, 2), RAMP)
    first, second = (buffer.take(frames(2, 1), RAMP) for _ in range(2))
    assert taken(first[0]) == taken(second[0]) == [[1, 2]]


@pytest.mark.parametrize("value", [[], [0], [1, -2], "12", 3, [1.5], [True], None])
def test_a_ramp_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="chunk_ramp"):
        ChunkRamp.parse(value)


def bridge() -> CodeFrames:
    return CodeFrames(StreamSource(stream="s", stage="talker", bridge="b"))


def test_the_bridge_reads_groups_of_codes() -> None:
    payload = np.array([[1, 2, 3], [4, 5, 6]], dtype="<i4")
    frame = Frame("s", 0, {"kind": "codes", "groups": 3}, memoryview(payload.tobytes()))
    (codes,) = bridge().feed(frame)
    assert isinstance(codes, np.ndarray)
    assert codes.tolist() == payload.tolist()


def test_the_bridge_takes_token_ids_as_one_group() -> None:
    payload = np.array([7, 8], dtype="<u4")
    (codes,) = bridge().feed(Frame("s", 0, {"kind": "tokens"}, memoryview(payload.tobytes())))
    assert isinstance(codes, np.ndarray)
    assert codes.tolist() == [[7], [8]]


def test_the_bridge_keeps_nothing_of_the_senders_memory() -> None:
    memory = bytearray(np.array([1, 2], dtype="<i4").tobytes())
    frame = Frame("s", 0, {"kind": "codes", "groups": 1}, memoryview(memory))
    (codes,) = bridge().feed(frame)
    memory[:] = bytes(len(memory))
    assert isinstance(codes, np.ndarray)
    assert codes[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("meta", [{}, {"kind": "rows"}, {"kind": "codes", "groups": 0}])
def test_a_frame_of_another_kind_fails_the_request(meta: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="talker"):
        bridge().feed(Frame("s", 0, meta, memoryview(b"")))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_however_the_speech_ended_the_rest_is_spoken(reason: str) -> None:
    assert bridge().end(StreamEnd(reason)) == [END_OF_CODES]
