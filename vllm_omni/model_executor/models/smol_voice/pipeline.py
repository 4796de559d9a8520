"""The stages of the small speaking assistant and how they feed each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.smol_voice.bridges import AUDIO_PLACEHOLDER

_FAMILY: Final = "vllm_omni.model_executor.models.smol_voice"
_MIB: Final = 1 << 20


def voice_names(model_dir: Path) -> tuple[str, ...]:
    """The voices of a checkpoint: `default`, then the speakers that its voice names."""
    path = model_dir / "voice" / "voice.json"
    try:
        speakers = json.loads(path.read_text(encoding="utf-8")).get("speaker_id_map", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the voice's settings {path}: {error}") from error
    return ("default", *sorted(name for name in speakers if name != "default"))


PIPELINE: Final = PipelineConfig(
    model_type="smol_voice",
    stages=(
        StageConfig(
            name="asr",
            kind=StageKind.AUTOREGRESSIVE,
            model_subfolder="asr",
            accepts=frozenset({Modality.AUDIO}),
            engine_defaults={
                "dtype": "float32",
                "max_model_len": 448,
                "kv_cache_memory_bytes": 192 * _MIB,
            },
            default_params={
                "temperature": 0.0,
                "max_tokens": 224,
                # The recogniser knows English only and was trained without language tokens.
                "extra_args": {
                    "speech_to_text": {
                        "language": "en",
                        "decoder_prompt": "<|startoftranscript|><|notimestamps|>",
                    }
                },
            },
        ),
        StageConfig(
            name="thinker",
            kind=StageKind.AUTOREGRESSIVE,
            model_subfolder="thinker",
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.TEXT,
            engine_defaults={
                "dtype": "float32",
                "max_model_len": 2048,
                "kv_cache_memory_bytes": 512 * _MIB,
            },
            default_params={
                "temperature": 0.2,
                "top_p": 0.9,
                # A model this small repeats itself without end otherwise.
                "repetition_penalty": 1.1,
                "max_tokens": 256,
            },
        ),
        StageConfig(
            name="voice",
            kind=StageKind.ONE_SHOT,
            model_subfolder="voice",
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.AUDIO,
            model_class=f"{_FAMILY}.voice:PiperVoice",
        ),
    ),
    edges=(
        Edge(
            source="asr",
            target="thinker",
            bridge=f"{_FAMILY}.bridges:insert_transcripts",
            when=frozenset({Modality.AUDIO}),
        ),
        Edge(
            source="thinker",
            target="voice",
            bridge=f"{_FAMILY}.bridges:SpokenClauses",
            streams=True,
        ),
    ),
    entries={Task.CHAT: "thinker", Task.SPEECH: "voice", Task.TRANSCRIPTION: "asr"},
    placeholders={Modality.AUDIO: AUDIO_PLACEHOLDER},
    voices=f"{_FAMILY}.pipeline:voice_names",
)
