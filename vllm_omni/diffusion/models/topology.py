"""Pipelines of one stage: a diffusers folder is one."""

from __future__ import annotations

from typing import Final

from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task

STAGE_NAME: Final = "diffusion"


def one_stage(
    name: str,
    *,
    model_class: str,
    capabilities: str,
    reads_images: bool = False,
    video: bool = False,
) -> PipelineConfig:
    """The pipeline of checkpoints of diffusers' class `name`.

    `model_class` is `module:Class` of its `StepPipeline` or `RequestPipeline`, `capabilities`
    `module:function` of what it can do.
    """
    accepts = {Modality.TEXT, Modality.IMAGE} if reads_images else {Modality.TEXT}
    stage = StageConfig(
        name=STAGE_NAME,
        kind=StageKind.DIFFUSION,
        accepts=frozenset(accepts),
        emits=Modality.VIDEO if video else Modality.IMAGE,
        model_class=model_class,
        capabilities=capabilities,
    )
    return PipelineConfig(
        model_type=name,
        stages=(stage,),
        entries={Task.VIDEO if video else Task.IMAGE: STAGE_NAME},
    )
