"""What the one-shot client and its replica say to each other: a closed set of tagged structs.

A message is one frame with a struct, followed by raw frames for samples, which the struct names
by their number. Unknown tags and fields are refused at decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_omni.engine.messages import StageFailure, StageOutput, StreamSource
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk

RawFrame = bytes | memoryview


class AudioRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `AudioInput`; its float32 samples are a raw frame."""

    frame: int
    sample_rate_hz: int


class PromptData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `OmniPrompt` on the wire."""

    text: str | None = None
    token_ids: list[int] | None = None
    audio: list[AudioRef] = []
    extra: dict[str, Any] = {}


class Add(msgspec.Struct, tag="add", frozen=True, forbid_unknown_fields=True):
    request_id: str
    prompt: PromptData | None
    params: SpeechParams | None
    sources: list[StreamSource]
    remaining_s: float | None
    """Time left until the deadline: clocks of two hosts have nothing in common."""


class Abort(msgspec.Struct, tag="abort", frozen=True, forbid_unknown_fields=True):
    request_ids: list[str]


class Utility(msgspec.Struct, tag="utility", frozen=True, forbid_unknown_fields=True):
    call_id: int
    method: str
    args: list[Any]


class SourceEnded(msgspec.Struct, tag="source_ended", frozen=True, forbid_unknown_fields=True):
    """The stage that writes a stream of a request has finished writing."""

    request_id: str
    stream: str


Command = Add | Abort | Utility | SourceEnded


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of one request; `failure` implies `finished`."""

    request_id: str
    finished: bool
    frame: int = -1
    """Raw frame with the samples, 16 bit little-endian; -1: no audio."""
    sample_rate_hz: int = 0
    failure: StageFailure | None = None


class Outputs(msgspec.Struct, tag="outputs", frozen=True, forbid_unknown_fields=True):
    """Everything that was ready at one moment."""

    outputs: list[Output]


class UtilityResult(msgspec.Struct, tag="utility_result", frozen=True, forbid_unknown_fields=True):
    call_id: int
    value: Any = None
    failure: StageFailure | None = None


Report = Outputs | UtilityResult

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def pack_prompt(prompt: OmniPrompt) -> tuple[PromptData, list[RawFrame]]:
    """A prompt and the raw frames that go with it."""
    frames: list[RawFrame] = [item.samples.astype("<f4").tobytes() for item in prompt.audio]
    refs = [AudioRef(i + 1, item.sample_rate_hz) for i, item in enumerate(prompt.audio)]
    token_ids = list(prompt.token_ids) if prompt.token_ids is not None else None
    return PromptData(prompt.text, token_ids, refs, dict(prompt.extra)), frames


def unpack_prompt(data: PromptData, frames: Sequence[RawFrame]) -> OmniPrompt:
    """The prompt again; `frames` are those of the message, the struct's own included.

    Raises:
        ValueError: a frame is missing or holds no samples.
    """
    audio = tuple(_audio_input(ref, frames) for ref in data.audio)
    return OmniPrompt(text=data.text, token_ids=data.token_ids, audio=audio, extra=data.extra)


def _audio_input(ref: AudioRef, frames: Sequence[RawFrame]) -> AudioInput:
    import numpy as np

    if not 0 < ref.frame < len(frames):
        raise ValueError(f"frame {ref.frame} of {len(frames)} is missing")
    return AudioInput(np.frombuffer(frames[ref.frame], dtype="<f4"), ref.sample_rate_hz)


def pack_outputs(outputs: Sequence[StageOutput]) -> list[RawFrame]:
    """One message for all outputs."""
    frames: list[RawFrame] = [b""]
    packed = []
    for output in outputs:
        number, rate = -1, 0
        if output.audio is not None:
            number, rate = len(frames), output.audio.sample_rate_hz
            frames.append(output.audio.pcm)
        packed.append(Output(output.request_id, output.finished, number, rate, output.failure))
    frames[0] = encode(Outputs(packed))
    return frames


def unpack_outputs(message: Outputs, frames: Sequence[RawFrame]) -> list[StageOutput]:
    """The outputs again, in order."""
    return [
        StageOutput(
            output.request_id,
            output.finished,
            audio=AudioChunk(bytes(frames[output.frame]), output.sample_rate_hz)
            if output.frame > 0
            else None,
            failure=output.failure,
        )
        for output in message.outputs
    ]
