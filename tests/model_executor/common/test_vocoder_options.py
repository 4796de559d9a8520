"""What an operator sets of a vocoder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trio import FakePlatform
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.vocoder import (
    VocoderOptions,
    audio_of,
    check_codes,
    speech_params,
)

STAGES = ("thinker", "talker", "code2wav")


def weightless(folder: Path) -> Path:
    config = {
        "model_type": "qwen3_omni_moe",
        "talker_config": {"speaker_id": {"ethan": 1}},
        "code2wav_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def resolved(folder: Path, *overrides: str) -> Any:
    dummy = [f"{name}.load_format=dummy" for name in STAGES]
    platform = FakePlatform("cpu", (("cpu", 8 << 30),))
    return resolve(folder, stage_overrides=[*dummy, *overrides], platform=platform)


def options(**given: object) -> VocoderOptions:
    defaults: dict[str, object] = {"chunk_ramp": [1, 2], "dtype": "auto", "load_format": "auto"}
    return VocoderOptions.read(
        ModelContext(model_dir=Path("/"), device="cpu", num_threads=1, options=defaults | given)
    )


def test_every_stage_runs_without_weights_when_told_so(tmp_path: Path) -> None:
    config = resolved(weightless(tmp_path))
    assert [s.deploy.engine_args["load_format"] for s in config.stages] == ["dummy"] * 3


def test_options_of_the_server_reach_the_vocoder_too(tmp_path: Path) -> None:
    platform = FakePlatform("cpu", (("cpu", 8 << 30),))
    given = {"load_format": "dummy", "dtype": "half", "max_num_batched_tokens": 64}
    config = resolve(weightless(tmp_path), cli=given, platform=platform)
    assert [s.deploy.engine_args["load_format"] for s in config.stages] == ["dummy"] * 3
    assert options(dtype=config.stages[2].deploy.engine_args["dtype"]).dtype is torch.float16


def test_the_ramp_is_an_option_of_the_stage(tmp_path: Path) -> None:
    config = resolved(weightless(tmp_path), "code2wav.chunk_ramp=[2, 6]")
    assert config.stages[2].deploy.engine_args["chunk_ramp"] == [2, 6]


def test_a_misspelt_option_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chunk_ramp"):
        resolved(weightless(tmp_path), "code2wav.chunk_rampe=[2, 6]")


def test_options_are_read() -> None:
    read = options(dtype="bfloat16", load_format="dummy")
    assert read.ramp.sizes == (1, 2)
    assert (read.dtype, read.has_random_weights) == (torch.bfloat16, True)
    assert options().dtype is torch.float32


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"load_format": "gguf"}, {"speed": 2}, {"chunk_ramp": [0]}]
)
def test_values_that_do_not_exist_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        options(**wrong)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        (None, SpeechParams(speed=2.0), "speed"),
        (OmniPrompt(text="Say this."), None, "input"),
    ],
)
def test_what_a_vocoder_cannot_do_is_refused(prompt: object, params: object, field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        speech_params(prompt, params)
    assert caught.value.field == field


def test_codes_of_another_shape_are_no_codes() -> None:
    with pytest.raises(ValueError, match="groups"):
        check_codes(torch.zeros(2, 3, dtype=torch.int32).numpy(), 16, 2048)


def test_sound_that_is_no_number_is_its_requests_error() -> None:
    assert isinstance(audio_of([torch.full((4,), torch.nan).numpy()]), RuntimeError)
    assert audio_of([]) is None
