"""The voices of a talker, by name."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_VOICE = "default"


def voice_id(speakers: Mapping[str, int], name: object, default: str) -> int:
    """The token or index of a voice, whatever its case. None and `default` mean the family's
    `default`, or the checkpoint's first one where it has not that.

    Raises:
        ValueError: there is no such voice.
    """
    if name is None or name == DEFAULT_VOICE:
        name = default if default in speakers else next(iter(speakers))
    for known, number in speakers.items():
        if known.lower() == str(name).lower():
            return number
    raise ValueError(f"no voice {name!r}; known: {', '.join(speakers)}")
