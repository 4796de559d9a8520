"""Which pipeline serves which checkpoint: a literal table of strings.

Importing this loads no family; `load_pipeline` loads exactly the one being served. A package
outside this one adds its families through the entry-point group `vllm_omni.pipelines`
(name: `model_type`, value: `module:NAME` of its `PipelineConfig`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import PipelineConfig
from vllm_omni.config.suggestions import did_you_mean
from vllm_omni.errors import ConfigError, UnsupportedModelError

ENTRY_POINT_GROUP: Final = "vllm_omni.pipelines"

PIPELINES: Final[Mapping[str, str]] = {
    "qwen2_5_omni": "vllm_omni.model_executor.models.qwen2_5_omni.pipeline:pipeline_of",
    "qwen3_omni_moe": "vllm_omni.model_executor.models.qwen3_omni.pipeline:pipeline_of",
    "smol_voice": "vllm_omni.model_executor.models.smol_voice.pipeline:PIPELINE",
    "FluxPipeline": "vllm_omni.diffusion.models.flux.pipeline:PIPELINE",
    "GlmImagePipeline": "vllm_omni.diffusion.models.glm_image.pipeline:pipeline_of",
    "QwenImageEditPipeline": "vllm_omni.diffusion.models.qwen_image.pipeline:EDIT_PIPELINE",
    "QwenImagePipeline": "vllm_omni.diffusion.models.qwen_image.pipeline:PIPELINE",
    "StableDiffusion3Pipeline": "vllm_omni.diffusion.models.stable_diffusion_3.pipeline:PIPELINE",
    "WanImageToVideoPipeline": "vllm_omni.diffusion.models.wan_video.pipeline:IMAGE_PIPELINE",
    "WanPipeline": "vllm_omni.diffusion.models.wan_video.pipeline:PIPELINE",
    "ZImagePipeline": "vllm_omni.diffusion.models.z_image.pipeline:PIPELINE",
    "diffusers": "vllm_omni.diffusion.models.plain_diffusers.pipeline:pipeline_of",
}
"""`model_type` of the checkpoint's config.json, or the pipeline class in its model_index.json, to
`module:NAME` of its pipeline or of a function that makes it from the model folder."""

ANY_DIFFUSERS: Final = "diffusers"
"""The entry that serves every diffusers folder whose class has none of its own."""

ARCHITECTURES: Final[Mapping[str, str]] = {
    "GlmImageForConditionalGeneration": "vllm_omni.diffusion.models.glm_image.writer:TokenWriter",
    "VllmOmniQwen25OmniTalker": "vllm_omni.model_executor.models.qwen2_5_omni.talker:Talker",
    "VllmOmniQwen25OmniThinker": "vllm_omni.model_executor.models.qwen2_5_omni.thinker:Thinker",
    "VllmOmniQwen3OmniTalker": "vllm_omni.model_executor.models.qwen3_omni.talker:Talker",
    "VllmOmniQwen3OmniThinker": "vllm_omni.model_executor.models.qwen3_omni.thinker:Thinker",
}
"""Architecture name to `module:Class`, for AUTOREGRESSIVE stages that vLLM itself cannot run."""

DEMOS: Final[Mapping[str, str]] = {
    "smol_voice": "vllm_omni.model_executor.models.smol_voice.assemble:assemble",
}
"""`model_type` to what writes a checkpoint of it that needs no model hub; the first is the demo."""


def known_pipelines() -> dict[str, str]:
    """Every `model_type` that has a pipeline, in this package or in an installed one."""
    known = dict(PIPELINES)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=_order):
        if known.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two pipelines for model_type {point.name!r}: {known[point.name]} and "
                f"{point.value}; uninstall one of the packages"
            )
    return known


def _order(point: EntryPoint) -> tuple[str, str]:
    return point.name, point.value


def load_pipeline(model_type: str, model_dir: Path | None = None) -> PipelineConfig:
    """Import exactly one model family: the one being served.

    Where checkpoints of a family differ in their stages, `model_dir` is the folder to look at.

    Raises:
        UnsupportedModelError: no family has this `model_type`.
        ConfigError: an installed package registers something that is no pipeline, or the family
            cannot tell its stages from the folder.
    """
    known = known_pipelines()
    if model_type not in known:
        raise UnsupportedModelError(
            f"no pipeline for model_type {model_type!r}{did_you_mean(model_type, known)}; "
            f"known: {', '.join(sorted(known))}"
        )
    module, _, name = known[model_type].partition(":")
    try:
        pipeline = getattr(importlib.import_module(module), name or "PIPELINE")
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"pipeline of model_type {model_type!r} cannot be loaded from "
            f"{known[model_type]}: {exc}"
        ) from exc
    if callable(pipeline) and model_dir is not None:
        pipeline = pipeline(model_dir)
    if not isinstance(pipeline, PipelineConfig):
        raise ConfigError(f"{known[model_type]} is not a PipelineConfig")
    return pipeline
