"""What the config.json and weights of a thinker-talker checkpoint say about its stages.

Runs in the API process before anything loads: reads JSON and headers, never a tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vllm_omni.config.pipeline import Modality, PipelineConfig
from vllm_omni.errors import ConfigError

_HEADER_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 256 << 20


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        ConfigError: it cannot be read.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


def why_silent(model_dir: Path, vocoder: str) -> str | None:
    """Why this checkpoint cannot speak; None when it can.

    Args:
        vocoder: prefix of the vocoder's weights, and with `_config` the key of its config.
    """
    config = read_config(model_dir)
    if config.get("enable_audio_output") is False:
        return "its config.json says enable_audio_output: false (Thinking and text checkpoints)"
    for part in ("talker", vocoder):
        if not isinstance(config.get(f"{part}_config"), dict):
            return f"its config.json has no {part}_config"
    names = set(_weight_prefixes(model_dir))
    for part in ("talker", vocoder):
        if names and part not in names:
            return f"it has no weights of the {part}"
    return None


def pipeline_for(
    pipeline: PipelineConfig, model_dir: Path, vocoder: str, silent_deploy: str
) -> PipelineConfig:
    """All stages, or the thinker alone for a checkpoint that cannot speak.

    Args:
        silent_deploy: name of the deploy file of the thinker alone.
    """
    reason = why_silent(model_dir, vocoder)
    if reason is None:
        return pipeline
    return replace(
        pipeline,
        stages=(pipeline.stages[pipeline.stage_id("thinker")],),
        edges=(),
        voices=None,
        absent={Modality.AUDIO: reason},
        deploy_name=silent_deploy,
    )


def speaker_names(model_dir: Path, key: str) -> tuple[str, ...]:
    """Voices of the talker's config, the default first.

    Raises:
        ConfigError: the checkpoint names none.
    """
    speakers = read_config(model_dir).get("talker_config", {}).get(key)
    if not isinstance(speakers, dict) or not speakers:
        raise ConfigError(f"{model_dir / 'config.json'}: talker_config.{key} names no voice")
    return ("default", *sorted(str(name) for name in speakers))


def _weight_prefixes(model_dir: Path) -> Iterable[str]:
    """The first part of every weight's name; nothing when there are no weights to be read."""
    for index in sorted(model_dir.glob("*.safetensors.index.json")):
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{index} is not a weights index") from error
        return (name.partition(".")[0] for name in names)
    return (
        name.partition(".")[0]
        for path in sorted(model_dir.glob("*.safetensors"))
        for name in _names_in(path)
    )


def _names_in(path: Path) -> Iterable[str]:
    """Names of the tensors in one safetensors file, from its header."""
    with path.open("rb") as file:
        prefix = file.read(_HEADER_BYTES)
        if len(prefix) < _HEADER_BYTES:
            return ()  # an empty file, which the check of weights names
        (size,) = struct.unpack("<Q", prefix)
        if size > _MAX_HEADER_BYTES:
            return ()
        try:
            header = json.loads(file.read(size))
        except ValueError:
            return ()
    return (name for name in header if name != "__metadata__")
