"""What a request for pictures may ask for. Unknown fields are refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vllm_omni.entrypoints.openai.media.images import OutputFormat
from vllm_omni.errors import BadRequestError

_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_QUALITIES: Final = {
    None: None,
    "auto": None,
    "standard": None,
    "medium": None,
    "high": "high",
    "hd": "high",
    "lossless": "lossless",
}
"""OpenAI's and our own names, to `OmniDiffusionSamplingParams.quality`."""
Scale = Annotated[float, Field(ge=0.0, le=1000.0, allow_inf_nan=False)]


def parse_size(size: str | None, field: str = "size") -> tuple[int, int] | None:
    """Width and height of `WxH`; None for `auto`, which is the model's own."""
    if size is None or size == "auto":
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise BadRequestError("size must be WIDTHxHEIGHT in pixels, or auto", field=field)
    return int(match[1]), int(match[2])


def parse_quality(quality: str | None) -> str | None:
    """What the engine calls it; refuses what this server cannot do."""
    if quality not in _QUALITIES:
        known = ", ".join(name for name in _QUALITIES if name)
        raise BadRequestError(f"quality must be one of {known}", field="quality")
    return _QUALITIES[quality]


def _known_size(size: str | None) -> str | None:
    parse_size(size)
    return size


def _known_quality(quality: str | None) -> str | None:
    parse_quality(quality)
    return quality


Size = Annotated[str | None, AfterValidator(_known_size)]
Quality = Annotated[str | None, AfterValidator(_known_quality)]


class DenoiseFields(BaseModel):
    """What pictures and videos share beside the prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    size: Size = None
    quality: Quality = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    negative_prompt: str | None = None
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    lora: str | None = None
    """Name of an adapter that the server was started with."""
    lora_scale: float | None = Field(default=None, allow_inf_nan=False)
    max_sequence_length: int | None = Field(default=None, ge=1)
    extra_args: dict[str, Any] | None = None
    """Further arguments of the pipeline behind a model that the generic adapter serves."""
    user: str | None = None
    """OpenAI's. Taken and not used: nothing here watches users."""


class PictureFields(DenoiseFields):
    """What generations, edits and pictures in a chat share."""

    n: int | None = Field(default=None, ge=1)
    output_format: OutputFormat | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    strength: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


class ImageRequest(PictureFields):
    """OpenAI's request for pictures from text, with the options of diffusion models."""

    prompt: str
    response_format: Literal["b64_json", "url"] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3)
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`."""
