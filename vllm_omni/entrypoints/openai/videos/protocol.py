"""What a request for a video may ask for. Unknown fields are refused."""

from __future__ import annotations

import math
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from vllm_omni.entrypoints.openai.images.protocol import DenoiseFields
from vllm_omni.errors import BadRequestError

_MAX_SECONDS: Final = 3600.0


def parse_seconds(seconds: str | float) -> float:
    """OpenAI sends a text; numbers are taken too."""
    try:
        value = float(seconds)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_SECONDS:
        raise BadRequestError(
            f"seconds must be a number above 0 and at most {_MAX_SECONDS:g}", field="seconds"
        )
    return value


def _known_seconds(seconds: str | float | None) -> str | float | None:
    if seconds is not None:
        parse_seconds(seconds)
    return seconds


class VideoRequest(DenoiseFields):
    """OpenAI's request for a video, with the options of diffusion models."""

    prompt: str
    seconds: Annotated[str | float | None, AfterValidator(_known_seconds)] = None
    num_frames: int | None = Field(default=None, ge=1)
    """Instead of `seconds`."""
    fps: int | None = Field(default=None, ge=1, le=240)


def frames_for(seconds: float, fps: int, multiple: int) -> int:
    """The number of frames nearest to a length that a model takes: one more than a multiple."""
    return max(0, round((seconds * fps - 1) / multiple)) * multiple + 1
