"""The stage of a diffusers folder: which media it reads and makes depends on its class."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import PipelineConfig
from vllm_omni.diffusion.models.plain_diffusers.capabilities import makes_video
from vllm_omni.diffusion.models.plain_diffusers.signature import signature_of
from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.plain_diffusers"


def pipeline_of(model_dir: Path) -> PipelineConfig:
    """The pipeline of one folder."""
    signature = signature_of(model_dir)
    return one_stage(
        signature.name,
        model_class=f"{_FAMILY}.diffusion_pipeline:AnyDiffusers",
        capabilities=f"{_FAMILY}.capabilities:capabilities_of",
        reads_images="image" in signature.arguments,
        video=makes_video(signature),
    )
