from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_omni.config.pipeline import Modality, Task, plan_route
from vllm_omni.config.registry import load_pipeline
from vllm_omni.errors import ConfigError, UnsupportedModalityError
from vllm_omni.model_executor.models.common.omni_checkpoint import speaker_names, why_silent

PARTS = ("thinker", "talker", "code2wav")


def checkpoint(folder: Path, parts: tuple[str, ...] = PARTS, **changes: Any) -> Path:
    """A folder with a config and weights that are only names."""
    config = {"model_type": "qwen3_omni_moe", **{f"{part}_config": {} for part in PARTS}}
    config["talker_config"] = {"speaker_id": {"ethan": 1, "aiden": 2}}
    config |= changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file({f"{part}.x": torch.zeros(1) for part in parts}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("parts", "changes", "reason"),
    [
        (PARTS, {}, None),
        (PARTS, {"enable_audio_output": True}, None),
        (PARTS, {"enable_audio_output": False}, "enable_audio_output: false"),
        (PARTS, {"talker_config": None}, "no talker_config"),
        (PARTS, {"code2wav_config": None}, "no code2wav_config"),
        (("thinker",), {}, "no weights of the talker"),
        (("thinker", "talker"), {}, "no weights of the code2wav"),
    ],
)
def test_a_checkpoint_says_whether_it_speaks(
    tmp_path: Path, parts: tuple[str, ...], changes: dict[str, Any], reason: str | None
) -> None:
    why = why_silent(checkpoint(tmp_path, parts, **changes), "code2wav")
    assert (why is None) == (reason is None)
    assert reason is None or reason in (why or "")


def test_the_names_in_an_index_count_too(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    index = {"weight_map": {"thinker.x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no weights of the talker" in (why_silent(folder, "code2wav") or "")


def test_a_folder_without_weights_is_judged_by_its_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    assert why_silent(folder, "code2wav") is None


def test_voices_are_those_of_the_talker_s_config(tmp_path: Path) -> None:
    assert speaker_names(checkpoint(tmp_path), "speaker_id") == ("default", "aiden", "ethan")
    with pytest.raises(ConfigError, match="names no voice"):
        speaker_names(checkpoint(tmp_path), "spk_id")


@pytest.mark.parametrize(
    ("model_type", "vocoder"), [("qwen3_omni_moe", "code2wav"), ("qwen2_5_omni", "token2wav")]
)
def test_a_checkpoint_without_a_voice_has_a_thinker_alone(
    tmp_path: Path, model_type: str, vocoder: str
) -> None:
    folder = checkpoint(tmp_path, model_type=model_type, enable_audio_output=False)
    silent = load_pipeline(model_type, folder)
    assert [stage.name for stage in silent.stages] == ["thinker"]
    assert silent.voices is None
    with pytest.raises(UnsupportedModalityError, match="enable_audio_output") as refused:
        plan_route(silent, Task.CHAT, frozenset(), frozenset({Modality.TEXT, Modality.AUDIO}))
    assert refused.value.field == "modalities"
    speaking = checkpoint(tmp_path, ("thinker", "talker", vocoder), **{f"{vocoder}_config": {}})
    assert [stage.name for stage in load_pipeline(model_type, speaking).stages] == [
        "thinker",
        "talker",
        vocoder,
    ]
