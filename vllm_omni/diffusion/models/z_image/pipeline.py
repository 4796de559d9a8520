"""The stage of Z-Image."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.z_image"

PIPELINE: Final = one_stage(
    "ZImagePipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:ZImage",
    capabilities=f"{_FAMILY}.capabilities:text_to_image",
)
