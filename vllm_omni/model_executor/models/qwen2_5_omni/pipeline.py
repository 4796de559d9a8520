"""The stages of Qwen2.5-Omni and how they feed each other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import (
    LAST_HIDDEN,
    Capture,
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.model_executor.models.common.omni_checkpoint import pipeline_for
from vllm_omni.model_executor.models.common.voice_file import load_voices

_FAMILY: Final = "vllm_omni.model_executor.models.qwen2_5_omni"

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
        "top_k": 40,
        "top_p": 0.8,
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
    capture=Capture(layers=(0, LAST_HIDDEN)),
)

TOKEN2WAV: Final = StageConfig(
    name="token2wav",
    kind=StageKind.ONE_SHOT,
    emits=Modality.AUDIO,
    model_class=f"{_FAMILY}.token2wav:Token2Wav",
    engine_defaults={
        # Codes of the first chunks, the last number for all later ones; 50 are a second.
        "chunk_ramp": [24, 36],
        "dtype": "float32",
        "load_format": "auto",
        "num_steps": 10,
    },
)

TALKER_TO_TOKEN2WAV: Final = Edge(
    source="talker",
    target="token2wav",
    bridge="vllm_omni.model_executor.models.common.code_stream:CodeFrames",
    streams=True,
)

PIPELINE: Final = PipelineConfig(
    model_type="qwen2_5_omni",
    stages=(THINKER, TALKER, TOKEN2WAV),
    edges=(THINKER_TO_TALKER, TALKER_TO_TOKEN2WAV),
    entries={Task.CHAT: "thinker"},
    voices=f"{_FAMILY}.pipeline:voice_names",
)


def pipeline_of(model_dir: Path) -> PipelineConfig:
    """All stages, or the thinker alone for checkpoints that cannot speak."""
    return pipeline_for(PIPELINE, model_dir, "token2wav", "qwen2_5_omni.thinking")


def voice_names(model_dir: Path) -> tuple[str, ...]:
    """The voices of a checkpoint, the default first."""
    return ("default", *sorted(map(str, load_voices(model_dir / "spk_dict.pt"))))
