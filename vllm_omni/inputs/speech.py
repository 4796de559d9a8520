"""Params of a stage that speaks."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from vllm_omni.errors import BadRequestError

MIN_SPEED: Final = 0.25
MAX_SPEED: Final = 4.0
_MAX_SEED: Final = 2**63 - 1


class SpeechParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a text is spoken."""

    voice: str = "default"
    speed: float = 1.0
    """Rate of speech; 1.0 is the voice's own, 2.0 twice as fast. 0.25 to 4.0."""
    seed: int | None = None


def check_speech(params: SpeechParams, field: str = "") -> None:
    """Refuse a speed that no voice has and a seed that no generator takes.

    Raises:
        BadRequestError: names the field, below `field` where the params stand in another.
    """
    prefix = f"{field}." if field else ""
    if not math.isfinite(params.speed) or not MIN_SPEED <= params.speed <= MAX_SPEED:
        raise BadRequestError(
            f"speed must be {MIN_SPEED} to {MAX_SPEED}, got {params.speed}", field=f"{prefix}speed"
        )
    if params.seed is not None and not -_MAX_SEED - 1 <= params.seed <= _MAX_SEED:
        raise BadRequestError("seed must fit 64 bits", field=f"{prefix}seed")
