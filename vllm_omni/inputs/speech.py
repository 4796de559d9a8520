"""Params of a stage that speaks."""

from __future__ import annotations

import msgspec


class SpeechParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a text is spoken."""

    voice: str = "default"
    speed: float = 1.0
    """Rate of speech; 1.0 is the voice's own, 2.0 twice as fast. 0.25 to 4.0."""
    seed: int | None = None
