"""What crosses to a one-shot replica is a closed set of messages, and arrives as it was."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.generation import wire
from vllm_omni.generation.samples import NonFiniteAudioError, audio_chunk
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt
from vllm_omni.outputs.media import AudioChunk


def test_a_prompt_arrives_with_its_samples() -> None:
    samples = np.linspace(-1, 1, 100, dtype=np.float32)
    prompt = OmniPrompt(text="hi", audio=(AudioInput(samples, 16000),), extra={"style": "calm"})
    data, frames = wire.pack_prompt(prompt)

    back = wire.unpack_prompt(data, [b"", *frames])

    assert (back.text, back.extra, back.audio[0].sample_rate_hz) == ("hi", {"style": "calm"}, 16000)
    assert np.array_equal(back.audio[0].samples, samples)


def test_a_prompt_whose_samples_are_missing_is_refused() -> None:
    data = wire.PromptData(text="hi", audio=[wire.AudioRef(1, 16000)])

    with pytest.raises(ValueError, match="frame 1 of 1 is missing"):
        wire.unpack_prompt(data, [b""])


def test_outputs_of_one_moment_are_one_message() -> None:
    outputs = [
        StageOutput("a", audio=AudioChunk(b"\1\2", 8000)),
        StageOutput("b", finished=True),
        StageOutput("c", finished=True, failure=StageFailure("request_failed", "why", "input")),
        StageOutput("d", finished=True, audio=AudioChunk(b"\3\4", 22050)),
    ]
    frames = wire.pack_outputs(outputs)
    report = wire.decode_report(frames[0])

    assert isinstance(report, wire.Outputs)
    assert wire.unpack_outputs(report, frames) == outputs


@pytest.mark.parametrize(
    "message",
    [
        {"type": "add", "request_id": "a"},
        {"type": "abort", "request_ids": ["a"], "why": "unknown field"},
        {"type": "explode"},
        ["abort", ["a"]],
    ],
)
def test_unknown_messages_and_fields_are_refused(message: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_command(msgspec.msgpack.encode(message))


def test_samples_become_clipped_16_bit_audio() -> None:
    chunk = audio_chunk(np.array([0.0, 0.5, 1.0, -2.0]), 8000)

    assert np.frombuffer(chunk.pcm, "<i2").tolist() == [0, 16384, 32767, -32767]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(NonFiniteAudioError):
        audio_chunk(np.array([0.0, bad]), 8000)
