"""Tiny random checkpoints in Hugging Face form, made in seconds, for tests with real engines.

The makers live with the family whose stages they are; this is their name for every other test.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_omni.model_executor.models.smol_voice.tiny import (
    make_tiny,
    make_tiny_llama,
    make_tiny_voice,
    make_tiny_whisper,
    train_tokenizer,
)

__all__ = [
    "config_of",
    "make_tiny",
    "make_tiny_llama",
    "make_tiny_voice",
    "make_tiny_whisper",
    "train_tokenizer",
]


def config_of(model_dir: Path) -> dict[str, object]:
    """The checkpoint's `config.json`."""
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text())
    return config
