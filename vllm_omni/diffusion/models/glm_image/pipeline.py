"""The stage of GLM-Image."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.glm_image"

PIPELINE: Final = one_stage(
    "GlmImagePipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:GlmImage",
    capabilities=f"{_FAMILY}.capabilities:text_to_image",
)
