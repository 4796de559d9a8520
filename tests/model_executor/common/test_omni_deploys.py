"""The shipped deploy files fit the pipelines and the devices that they are for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from tests.model_executor.common.test_omni_checkpoint import checkpoint
from tests.trio import FakePlatform
from vllm_omni.config.resolve import SHIPPED, resolve

DEPLOYS = Path(str(resources.files(SHIPPED)))


def host(num_gpus: int, gib: int) -> FakePlatform:
    return FakePlatform("cuda", tuple((f"cuda:{i}", gib << 30) for i in range(num_gpus)))


def folder_of(folder: Path, model_type: str, vocoder: str, *, speaks: bool = True) -> Path:
    return checkpoint(
        folder,
        ("thinker", "talker", vocoder),
        model_type=model_type,
        enable_audio_output=speaks,
        **{f"{vocoder}_config": {}},
    )


@pytest.mark.parametrize(
    ("model_type", "vocoder", "file", "platform", "devices"),
    [
        ("qwen3_omni_moe", "code2wav", None, host(1, 139), ("cuda:0",) * 3),
        (
            "qwen3_omni_moe",
            "code2wav",
            "qwen3_omni.two_gpus.yaml",
            host(2, 80),
            ("cuda:0", "cuda:1", "cuda:1"),
        ),
        ("qwen2_5_omni", "token2wav", None, host(1, 48), ("cuda:0",) * 3),
    ],
)
def test_a_deploy_places_every_stage(
    tmp_path: Path,
    model_type: str,
    vocoder: str,
    file: str | None,
    platform: FakePlatform,
    devices: tuple[str, ...],
) -> None:
    config = resolve(
        folder_of(tmp_path, model_type, vocoder),
        deploy_config=DEPLOYS / file if file else None,
        platform=platform,
    )
    assert [stage.config.name for stage in config.stages] == ["thinker", "talker", vocoder]
    assert tuple(stage.deploy.devices[0] for stage in config.stages) == devices
    assert all(stage.deploy.memory_fraction for stage in config.stages)
    name = file or f"{config.pipeline.deploy_name or model_type}.cuda.yaml"
    assert name in config.provenance["stages.talker.max_batch_size"]


def test_a_checkpoint_that_only_writes_has_a_deploy_of_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3_omni_moe", "code2wav", speaks=False)
    config = resolve(folder, platform=host(1, 80))
    (stage,) = config.stages
    assert stage.config.name == "thinker"
    assert "thinking.cuda.yaml" in config.provenance["stages.thinker.max_batch_size"]
