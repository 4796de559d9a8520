"""The stages of Qwen3-Omni and how they feed each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.model_executor.models.common.omni_checkpoint import speaker_names, why_silent

_FAMILY: Final = "vllm_omni.model_executor.models.qwen3_omni"

THINKER: Final = StageConfig(
    name="thinker",
    kind=StageKind.AUTOREGRESSIVE,
    accepts=frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO}),
    emits=Modality.TEXT,
    default_params={"max_tokens": 2048},
)

PIPELINE: Final = PipelineConfig(
    model_type="qwen3_omni_moe",
    stages=(THINKER,),
    entries={Task.CHAT: "thinker"},
    variant=f"{_FAMILY}.pipeline:pipeline_of_checkpoint",
    deploy_name="qwen3_omni",
)


def pipeline_of_checkpoint(model_dir: Path) -> PipelineConfig:
    """All stages, or the thinker alone for checkpoints that cannot speak."""
    reason = why_silent(model_dir, "code2wav")
    if reason is None:
        return PIPELINE
    return replace(
        PIPELINE,
        stages=(THINKER,),
        edges=(),
        voices=None,
        absent={Modality.AUDIO: reason},
        deploy_name="qwen3_omni.thinking",
    )


def voice_names(model_dir: Path) -> tuple[str, ...]:
    """The voices of a checkpoint."""
    return speaker_names(model_dir, "speaker_id")
