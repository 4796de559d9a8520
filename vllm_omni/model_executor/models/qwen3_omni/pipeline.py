"""The stages of Qwen3-Omni and how they feed each other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import (
    Capture,
    CaptureScope,
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.model_executor.models.common.omni_checkpoint import pipeline_for, speaker_names

_FAMILY: Final = "vllm_omni.model_executor.models.qwen3_omni"

THINKER: Final = StageConfig(
    name="thinker",
    kind=StageKind.AUTOREGRESSIVE,
    accepts=frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO}),
    emits=Modality.TEXT,
    hf_config=f"{_FAMILY}.stage_configs:thinker_config",
    default_params={"max_tokens": 2048},
)

TALKER: Final = StageConfig(
    name="talker",
    kind=StageKind.AUTOREGRESSIVE,
    hf_config=f"{_FAMILY}.stage_configs:talker_config",
    speaks=True,
    default_params={
        "temperature": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.05,
        "max_tokens": 4096,
        "detokenize": False,
    },
)

THINKER_TO_TALKER: Final = Edge(
    source="thinker",
    target="talker",
    bridge=f"{_FAMILY}.bridges:TalkerConditioning",
    streams=True,
    capture=Capture(
        layers=("talker_config.accept_hidden_layer",),
        # Words are looked up again by the talker; only what media became exists nowhere else.
        scope=CaptureScope.MEDIA,
    ),
)

CODE2WAV: Final = StageConfig(
    name="code2wav",
    kind=StageKind.ONE_SHOT,
    emits=Modality.AUDIO,
    model_class=f"{_FAMILY}.code2wav:Code2Wav",
    engine_defaults={
        # Codes of the first chunks, the last number for all later ones; 12.5 frames are a second.
        "chunk_ramp": [1, 2, 4, 8],
        "dtype": "auto",
        "load_format": "auto",
    },
)

TALKER_TO_CODE2WAV: Final = Edge(
    source="talker",
    target="code2wav",
    bridge="vllm_omni.model_executor.models.common.code_stream:CodeFrames",
    streams=True,
)

PIPELINE: Final = PipelineConfig(
    model_type="qwen3_omni_moe",
    stages=(THINKER, TALKER, CODE2WAV),
    edges=(THINKER_TO_TALKER, TALKER_TO_CODE2WAV),
    entries={Task.CHAT: "thinker"},
    voices=f"{_FAMILY}.pipeline:voice_names",
    deploy_name="qwen3_omni",
)


def pipeline_of(model_dir: Path) -> PipelineConfig:
    """All stages, or the thinker alone for checkpoints that cannot speak."""
    return pipeline_for(PIPELINE, model_dir, "code2wav", "qwen3_omni.thinking")


def voice_names(model_dir: Path) -> tuple[str, ...]:
    """The voices of a checkpoint."""
    return speaker_names(model_dir, "speaker_id")
