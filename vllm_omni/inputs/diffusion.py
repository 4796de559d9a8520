"""Params of a diffusion stage, as a user gives them per request.

What only the model can say (sizes it takes, options it knows) is checked against its capabilities
when the request is prepared (`diffusion/preparer.py`); what is wrong for every model, here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_omni.errors import BadRequestError

QUALITIES: Final = ("lossless", "high")
MAX_OUTPUTS: Final = 16
MAX_PROMPT_CHARS: Final = 8192
_SEED_BITS: Final = 63
_COUNTS: Final[Mapping[str, int]] = {
    "num_outputs_per_prompt": MAX_OUTPUTS,
    "num_inference_steps": 1000,
    "height": 16384,
    "width": 16384,
    "num_frames": 4096,
    "fps": 240,
    "max_sequence_length": 65536,
    "preview_interval": 1000,
}
"""Integers of at least 1, and the most that any model takes."""


@dataclass(slots=True, kw_only=True)
class OmniDiffusionSamplingParams:
    """What one request asks of a diffusion stage. None: the model's own default."""

    seed: int | None = None
    """None: a random one. Of several outputs, output `i` is made with `seed + i`."""
    num_inference_steps: int | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    num_frames: int | None = None
    fps: int | None = None
    """Frames per second of a video."""
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    strength: float | None = None
    """How much of an input image is made anew: above 0, at most 1."""
    max_sequence_length: int | None = None
    """Most tokens of the prompt that reach the model."""
    num_outputs_per_prompt: int = 1
    quality: str | None = None
    """None, `lossless` or `high`."""
    lora: str | None = None
    """Name of a LoRA adapter the server was started with."""
    lora_scale: float | None = None
    preview_interval: int | None = None
    """Send a preview image after every so many steps; None: no previews."""
    extra_args: dict[str, object] = field(default_factory=dict)
    """Further arguments of a model served by the generic adapter."""

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            _check_int(name, getattr(self, name), 1, most)
        _check_int("seed", self.seed, 0, 2**_SEED_BITS - 1)
        for name in ("guidance_scale", "true_cfg_scale"):
            _check_float(name, getattr(self, name), 0.0, 1000.0)
        _check_float("lora_scale", self.lora_scale, -100.0, 100.0)
        _check_float("strength", self.strength, 0.0, 1.0)
        if self.strength == 0:
            raise BadRequestError("strength must be above 0", field="strength")
        if self.quality is not None and self.quality not in QUALITIES:
            raise BadRequestError(
                f"quality must be None, 'lossless' or 'high', got {self.quality!r}", field="quality"
            )
        check_prompt("negative_prompt", self.negative_prompt)
        if self.lora is not None and not isinstance(self.lora, str):
            raise BadRequestError("lora must be the name of an adapter", field="lora")
        if self.lora_scale is not None and self.lora is None:
            raise BadRequestError("lora_scale needs lora", field="lora_scale")

    @property
    def n(self) -> int:
        """OpenAI's name of `num_outputs_per_prompt`."""
        return self.num_outputs_per_prompt


def check_prompt(name: str, text: object) -> None:
    """Refuse what is no text, or too long for any model here.

    Raises:
        BadRequestError: names the field.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise BadRequestError(f"{name} must be a string", field=name)
    if len(text) > MAX_PROMPT_CHARS:
        raise BadRequestError(
            f"{name} has {len(text)} characters; at most {MAX_PROMPT_CHARS} are taken", field=name
        )


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if value is None and name != "num_outputs_per_prompt":
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(f"{name} must be an integer, got {value!r}", field=name)
    if not least <= value <= most:
        raise BadRequestError(f"{name} must be {least} to {most}, got {value}", field=name)


def _check_float(name: str, value: object, least: float, most: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"{name} must be a number, got {value!r}", field=name)
    if not (math.isfinite(value) and least <= value <= most):
        raise BadRequestError(f"{name} must be {least:g} to {most:g}, got {value}", field=name)
