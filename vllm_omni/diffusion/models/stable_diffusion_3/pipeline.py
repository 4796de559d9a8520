"""The stage of Stable Diffusion 3."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.stable_diffusion_3"

PIPELINE: Final = one_stage(
    "StableDiffusion3Pipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:StableDiffusion3",
    capabilities=f"{_FAMILY}.capabilities:text_to_image",
)
