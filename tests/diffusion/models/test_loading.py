"""A folder becomes the reference's pipeline, with its weights or with random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.diffusion.models.flux.tiny import make_tiny
from vllm_omni.diffusion.models.interface import PipelineContext
from vllm_omni.diffusion.models.loading import load_reference, modules_of
from vllm_omni.errors import ConfigError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", 1)


def context_of(model_dir: Path, load_format: str = "auto") -> PipelineContext:
    return PipelineContext(
        model_dir=model_dir, device="cpu", dtype=torch.bfloat16, load_format=load_format
    )


def shapes(pipeline: object) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        f"{name}.{key}": (value.shape, value.dtype)
        for name, module in modules_of(pipeline).items()
        for key, value in module.named_parameters()
    }


def settings(module: Any) -> dict[str, object]:
    """Without the folder that the weights came from."""
    return {key: value for key, value in module.config.items() if key != "_name_or_path"}


def test_random_weights_have_the_shapes_and_types_of_the_checkpoint(model_dir: Path) -> None:
    loaded = load_reference(context_of(model_dir))
    random = load_reference(context_of(model_dir, "dummy"))

    assert shapes(random) == shapes(loaded)
    assert settings(random.transformer) == settings(loaded.transformer)
    assert all(p.isfinite().all() for p in random.transformer.parameters())
    assert not any(p.requires_grad for p in loaded.transformer.parameters())


def test_components_can_have_a_type_of_their_own_or_stay_away(model_dir: Path) -> None:
    for load_format in ("auto", "dummy"):
        pipeline = load_reference(
            context_of(model_dir, load_format),
            component_dtypes={"vae": torch.float32},
            unused=("text_encoder_2",),
        )

        assert pipeline.vae.dtype is torch.float32
        assert pipeline.transformer.dtype is torch.bfloat16
        assert pipeline.text_encoder_2 is None


def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_reference(context_of(tmp_path))
    index.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_reference(context_of(tmp_path))
    index.write_text(json.dumps({"_class_name": "NoSuchPipeline"}))
    with pytest.raises(ConfigError, match="no pipeline class 'NoSuchPipeline'"):
        load_reference(context_of(tmp_path))
    index.write_text(
        json.dumps(
            {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
        )
    )
    with pytest.raises(ConfigError, match="cannot be loaded as FluxPipeline") as caught:
        load_reference(context_of(tmp_path))
    assert "\n" not in str(caught.value)
