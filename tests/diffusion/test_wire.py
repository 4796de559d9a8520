"""What crosses between client and replica is the same on the other side."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np
import pytest

from tests.diffusion.bench import request
from vllm_omni.diffusion import wire
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.outputs.media import Frames, StepProgress

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def test_a_request_is_the_same_on_the_other_side() -> None:
    sent = request(
        "a",
        "a cat",
        negative_prompt="dogs",
        seed=2**63 - 1,
        quality="high",
        images=(PIXELS, PIXELS[::2]),
        mask=PIXELS[:, :, 0],
        lora="wild",
        lora_scale=0.5,
        upstream={"token_ids": [1, 2]},
        extra_args={"eta": 0.5},
    )
    frames = wire.pack_add(sent, 3.5, 2)
    command = wire.decode_command(frames[0])
    assert isinstance(command, wire.Add)
    got = wire.unpack_request(command.request, frames)

    for field in fields(DiffusionRequest):
        before, after = getattr(sent, field.name), getattr(got, field.name)
        if field.name == "images":
            assert all(map(np.array_equal, before, after))
        elif field.name == "mask":
            assert np.array_equal(before, after)
        else:
            assert before == after, field.name
    assert (command.remaining_s, command.preview_interval) == (3.5, 2)


def test_every_field_of_a_request_crosses() -> None:
    assert set(wire.RequestData.__struct_fields__) == {f.name for f in fields(DiffusionRequest)}


def test_outputs_are_the_same_on_the_other_side() -> None:
    video = np.stack([PIXELS, 255 - PIXELS])
    sent = [
        StageOutput("a", progress=StepProgress(3, 20), preview=Frames.of(PIXELS)),
        StageOutput("b", finished=True, frames=Frames.of(video, 16.0)),
        StageOutput("c", finished=True, failure=StageFailure("out_of_memory", "none", "size")),
    ]
    frames = wire.pack_outputs(sent)
    report = wire.decode_report(frames[0])
    assert isinstance(report, wire.Outputs)

    assert wire.unpack_outputs(report, frames) == sent


def test_missing_and_short_frames_are_refused() -> None:
    frames = wire.pack_outputs([StageOutput("b", finished=True, frames=Frames.of(PIXELS))])
    report = wire.decode_report(frames[0])
    assert isinstance(report, wire.Outputs)

    with pytest.raises(ValueError, match="missing"):
        wire.unpack_outputs(report, frames[:1])
    with pytest.raises(ValueError, match="no pixels"):
        wire.unpack_outputs(report, [frames[0], b"abc"])


def test_unknown_commands_and_fields_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_command(msgspec.msgpack.encode({"type": "explode"}))
    with pytest.raises(msgspec.DecodeError):
        wire.decode_command(msgspec.msgpack.encode({"type": "abort", "request_ids": [], "x": 1}))
