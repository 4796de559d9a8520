"""The stage of FLUX.1."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.flux"

PIPELINE: Final = one_stage(
    "FluxPipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:Flux",
    capabilities=f"{_FAMILY}.capabilities:text_to_image",
)
