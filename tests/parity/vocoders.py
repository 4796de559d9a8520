"""Drives a vocoder as the one-shot engine does, and holds what it says against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import nn

from vllm_omni.generation.model import ModelContext, OneShotModel, Work
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.code_stream import END_OF_CODES
from vllm_omni.outputs.media import AudioChunk

Samples = np.ndarray[Any, np.dtype[np.float32]]
Codes = np.ndarray[Any, np.dtype[np.int32]]


def context(model_dir: Path, **options: object) -> ModelContext:
    given: Mapping[str, object] = {"dtype": "float32", "load_format": "auto", **options}
    return ModelContext(model_dir=model_dir, device="cpu", num_threads=1, options=given)


def save_part(model_dir: Path, part: nn.Module, prefix: str, config: Any) -> None:
    """A checkpoint that holds this part alone."""
    state = {f"{prefix}.{name}": value for name, value in part.state_dict().items()}
    save_file(state, model_dir / "model.safetensors")
    config.save_pretrained(model_dir)


def speak(
    model: OneShotModel, codes: Sequence[Codes], params: Sequence[SpeechParams | None] | None = None
) -> list[Samples]:
    """What each request says when all write a frame in every step."""
    params = params or [None] * len(codes)
    states = [model.start(None, given)[0] for given in params]
    parts: list[list[Samples]] = [[] for _ in codes]
    for step in range(max(map(len, codes)) + 1):
        batch = {
            i: Work(states[i], _input(given, step), is_last=step == len(given))
            for i, given in enumerate(codes)
            if step <= len(given)
        }
        for i, result in zip(batch, model.forward(list(batch.values())), strict=True):
            assert not isinstance(result, BaseException), result
            if result is not None:
                assert isinstance(result, AudioChunk)
                assert result.sample_rate_hz == 24_000
                parts[i].append(result.samples())
    for state in states:
        model.finish(state)
    return [np.concatenate(p) if p else np.empty(0, dtype=np.float32) for p in parts]


def _input(codes: Codes, step: int) -> object:
    return codes[step : step + 1] if step < len(codes) else END_OF_CODES


def difference(first: Samples, second: Samples) -> float:
    """The greatest of all samples; they must be as many."""
    assert first.shape == second.shape
    return float(np.abs(first - second).max(initial=0.0))
