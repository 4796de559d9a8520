"""A diffusers folder is a pipeline of its own; its options are strict like all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trio import GPUS, FakePlatform
from vllm_omni.config import registry
from vllm_omni.config.deploy import ResolvedStage
from vllm_omni.config.detect import detect
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import ConfigError

STRIPES = PipelineConfig(
    model_type="StripePipeline",
    stages=(StageConfig(name="dit", kind=StageKind.DIFFUSION, emits=Modality.IMAGE),),
    entries={Task.IMAGE: "dit"},
)


def any_pipeline(model_dir: Path) -> PipelineConfig:
    """What the adapter's entry is: made from the folder."""
    index = json.loads((model_dir / "model_index.json").read_text())
    return PipelineConfig(
        model_type=index["_class_name"], stages=STRIPES.stages, entries=STRIPES.entries
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    known = {
        "StripePipeline": f"{__name__}:STRIPES",
        registry.ANY_DIFFUSERS: f"{__name__}:any_pipeline",
    }
    monkeypatch.setattr(registry, "PIPELINES", known)
    write_index(tmp_path, {"_class_name": "StripePipeline"})
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return tmp_path


def write_index(folder: Path, index: object) -> None:
    (folder / "model_index.json").write_text(json.dumps(index))


def resolved(folder: Path, *overrides: str, **options: Any) -> ResolvedStage:
    config = resolve(folder, platform=FakePlatform(), stage_overrides=overrides, **options)
    return config.stages[0]


def test_a_folder_is_found_by_its_class(folder: Path) -> None:
    assert detect(folder) == "StripePipeline"


def test_any_other_class_is_the_adapters(folder: Path) -> None:
    write_index(folder, {"_class_name": "NewestPipeline"})

    assert detect(folder) == registry.ANY_DIFFUSERS
    config = resolve(folder, platform=FakePlatform())
    assert config.pipeline.model_type == "NewestPipeline"


@pytest.mark.parametrize("index", [{}, {"_class_name": 5}, []])
def test_an_index_without_a_class_stops_the_start(folder: Path, index: object) -> None:
    write_index(folder, index)

    with pytest.raises(ConfigError, match=r"model_index\.json"):
        detect(folder)


def test_options_arrive_in_their_types(folder: Path) -> None:
    stage = resolved(
        folder,
        "dit.step_cache=first_block",
        "dit.step_cache_threshold=0.2",
        "dit.enforce_eager=false",
        "dit.conditioning_cache_bytes=1MiB",
        'dit.lora_modules={"ink": "/ink"}',
        "dit.max_batch_size=3",
        engine_options={"dtype": "bfloat16"},
    )

    assert stage.deploy.engine_args == {
        "step_cache": "first_block",
        "step_cache_threshold": 0.2,
        "enforce_eager": False,
        "conditioning_cache_bytes": 2**20,
        "lora_modules": {"ink": "/ink"},
        "dtype": "bfloat16",
    }
    assert stage.deploy.max_batch_size == 3


def test_one_piece_of_work_may_take_minutes(folder: Path) -> None:
    assert resolved(folder).deploy.stall_timeout_s == 300.0
    assert resolved(folder, "dit.stall_timeout_s=20").deploy.stall_timeout_s == 20.0


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("dit.step_cash=first_block", "step_cache"),
        ("dit.step_cache=teacache", "must be one of none, first_block"),
        ("dit.offload=model", "must be one of none, group"),
        ("dit.enforce_eager=perhaps", "must be"),
        ("dit.max_model_len=5", "unknown setting"),
    ],
)
def test_what_is_no_option_is_refused(folder: Path, override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolved(folder, override)


def test_vllms_own_options_do_not_reach_a_diffusion_stage(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no stage of this model takes it"):
        resolved(folder, engine_options={"max_model_len": 5})


def test_random_weights_need_no_files(folder: Path) -> None:
    (folder / "transformer" / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match="stage 'dit' has no weights"):
        resolved(folder)
    assert resolved(folder, engine_options={"load_format": "dummy"}).model_dir == folder


def test_a_replica_may_have_several_devices_and_takes_memory_of_each(folder: Path) -> None:
    stage = resolve(folder, platform=GPUS, stage_overrides=("dit.devices=cuda:0,1",)).stages[0]

    assert stage.deploy.devices == ("cuda:0,1",)
    assert stage.deploy.memory_fraction == 0.9
