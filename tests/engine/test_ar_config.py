"""Engine arguments of stages that condition others, or are conditioned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ar_replicas import spec_of
from vllm_omni.config.pipeline import LAST_HIDDEN, Capture, CaptureScope
from vllm_omni.engine.ar_config import engine_arguments
from vllm_omni.errors import ConfigError
from vllm_omni.worker.stage_options import CPU_WORKER, StageOptions


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"talker_config": {"layer": 24}}))
    return tmp_path


def test_other_stages_have_the_engine_s_own_scheduler(model_dir: Path) -> None:
    arguments = engine_arguments(spec_of(model_dir))

    assert arguments["worker_cls"] == CPU_WORKER
    assert not {"scheduler_cls", "additional_config"} & set(arguments)


def test_layers_are_numbers_or_names_in_the_checkpoints_config(model_dir: Path) -> None:
    capture = Capture(layers=(0, LAST_HIDDEN, "talker_config.layer"), scope=CaptureScope.MEDIA)
    arguments = engine_arguments(spec_of(model_dir, capture=capture))

    assert StageOptions.of(arguments["additional_config"]) == StageOptions(
        capture_layers=(0, LAST_HIDDEN, 24), capture_scope=CaptureScope.MEDIA
    )
    assert "enable_prefix_caching" not in arguments, "its prompts are cached as ever"


def test_a_layer_that_the_config_does_not_have_is_named(model_dir: Path) -> None:
    capture = Capture(layers=("talker_config.depth",))
    with pytest.raises(ConfigError, match=r"config\.json has no number 'talker_config\.depth'"):
        engine_arguments(spec_of(model_dir, capture=capture))


def test_a_conditioned_stage_reads_embeddings_and_caches_no_prefix(model_dir: Path) -> None:
    arguments = engine_arguments(spec_of(model_dir, has_sources=True))

    assert StageOptions.of(arguments["additional_config"]) == StageOptions(is_conditioned=True)
    assert arguments["enable_prompt_embeds"] is True
    assert arguments["enable_prefix_caching"] is False
    assert arguments["generation_config"] == "vllm"
