"""The stage of Wan, without a picture and with one."""

from __future__ import annotations

from typing import Final

from vllm_omni.diffusion.models.topology import one_stage

_FAMILY: Final = "vllm_omni.diffusion.models.wan_video"

PIPELINE: Final = one_stage(
    "WanPipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:WanTextToVideo",
    capabilities=f"{_FAMILY}.capabilities:text_to_video",
    video=True,
)
IMAGE_PIPELINE: Final = one_stage(
    "WanImageToVideoPipeline",
    model_class=f"{_FAMILY}.diffusion_pipeline:WanImageToVideo",
    capabilities=f"{_FAMILY}.capabilities:image_to_video",
    reads_images=True,
    video=True,
)
