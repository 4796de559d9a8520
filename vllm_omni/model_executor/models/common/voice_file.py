"""A checkpoint's file of voices: a mapping from names to tensors and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from vllm_omni.errors import ConfigError


def load_voices(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read `path` on the host. It may hold tensors and plain values, nothing that runs.

    Raises:
        ConfigError: it cannot be read, or holds no voice.
    """
    import torch

    try:
        voices = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"cannot read the voices {path}: {text}") from error
    if not isinstance(voices, Mapping) or not voices:
        raise ConfigError(f"{path} holds no voices")
    return voices
