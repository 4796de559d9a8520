"""Parts of a checkpoint that is made from the reference classes, without a download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_SCALES: Final = ("alpha", "beta", "gamma", "scale")
"""Parameters of one value per channel that start at nothing and are learnt."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from a seed inside, as they were afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; mappings inside are merged too."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = merged(inner, value)
        result[key] = value
    return result


def spread_weights(module: nn.Module, gain: float = 1.0) -> None:
    """Give every layer's output the size of its input.

    What the reference classes start with leaves a network this small nearly silent, which would
    let a test pass that compares two silences.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            last = name.rpartition(".")[2]
            if last in _SCALES:
                parameter.uniform_(-0.5, 0.5)
            elif last == "bias":
                parameter.normal_(std=0.05)
            elif parameter.ndim >= 2:
                fan_in = parameter[0].numel()
                parameter.normal_(std=gain / math.sqrt(fan_in))


def speech_feature_extractor() -> Any:
    """The log-mel extractor of both families: 128 bands, 10 ms, at most five minutes."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True)


def vision_processors(patch_size: int, **pixels: int) -> tuple[Any, Any]:
    """The image and video processors of both families."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    sizes: dict[str, Any] = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    normal: dict[str, Any] = {}
    if patch_size == 16:
        normal = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return (
        Qwen2VLImageProcessor(**sizes, **normal, **pixels),
        Qwen2VLVideoProcessor(**sizes, **normal, **pixels),
    )


def write_generation_config(
    out_dir: Path, tokenizer: PreTrainedTokenizerBase, extra: Mapping[str, Any]
) -> None:
    """End tokens of the thinker, and what else a family wants."""
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    content = {"eos_token_id": [end, pad], "pad_token_id": pad, **extra}
    text = json.dumps(content, indent=2) + "\n"
    (out_dir / "generation_config.json").write_text(text, encoding="utf-8")
