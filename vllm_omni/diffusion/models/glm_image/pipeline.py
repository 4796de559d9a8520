"""The stages of GLM-Image: a text model writes image tokens, a denoiser draws them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.diffusion.models.glm_image.bridges import IMAGE_START, IMAGE_START_KEY
from vllm_omni.diffusion.models.topology import STAGE_NAME
from vllm_omni.errors import ConfigError

_FAMILY: Final = "vllm_omni.diffusion.models.glm_image"
_WRITER_DIR: Final = "vision_language_encoder"
_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
"""What the reference's generation uses where the checkpoint says nothing."""
MAX_TOKENS: Final = 16_384
"""Longest prompt and the tokens of the largest picture, where the checkpoint has so many."""


def pipeline_of(model_dir: Path) -> PipelineConfig:
    """The text model in vLLM, the denoiser in the diffusion engine."""
    tokenizer_dir = model_dir / "processor"
    start = _read(tokenizer_dir / "tokenizer_config.json").get("bos_token", IMAGE_START)
    generation = _read(model_dir / _WRITER_DIR / "generation_config.json")
    config = _read(model_dir / _WRITER_DIR / "config.json")
    positions = config.get("text_config", {}).get("max_position_embeddings", MAX_TOKENS)
    sampling = {name: generation.get(name) or value for name, value in _SAMPLING.items()}
    writer = StageConfig(
        name="writer",
        kind=StageKind.AUTOREGRESSIVE,
        model_subfolder=_WRITER_DIR,
        accepts=frozenset({Modality.TEXT}),
        engine_defaults={
            "tokenizer": str(tokenizer_dir),
            "max_model_len": min(MAX_TOKENS, positions),
        },
        default_params={**sampling, "extra_args": {IMAGE_START_KEY: start}},
    )
    denoiser = StageConfig(
        name=STAGE_NAME,
        kind=StageKind.DIFFUSION,
        emits=Modality.IMAGE,
        model_class=f"{_FAMILY}.diffusion_pipeline:GlmImage",
        capabilities=f"{_FAMILY}.capabilities:text_to_image",
    )
    return PipelineConfig(
        model_type="GlmImagePipeline",
        stages=(writer, denoiser),
        edges=(
            Edge(source="writer", target=STAGE_NAME, bridge=f"{_FAMILY}.bridges:hand_over_tokens"),
        ),
        entries={Task.IMAGE: "writer"},
        entry_prompt=f"{_FAMILY}.bridges:ask_for_tokens",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content
