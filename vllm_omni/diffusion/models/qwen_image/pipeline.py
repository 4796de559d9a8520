"""The stage of Qwen-Image, and of Qwen-Image-Edit."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.qwen_image"

PIPELINE: Final = one_stage(
    "QwenImagePipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:QwenImage",
    capabilities=f"{_FAMILY}.capabilities:text_to_image",
)
EDIT_PIPELINE: Final = one_stage(
    "QwenImageEditPipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:QwenImageEdit",
    capabilities=f"{_FAMILY}.capabilities:edit",
    reads_images=True,
)
