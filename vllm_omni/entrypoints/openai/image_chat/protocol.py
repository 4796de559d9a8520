"""What a chat with a picture model may ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni.entrypoints.openai.images.protocol import PictureFields


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class ImageChatRequest(PictureFields):
    """OpenAI's chat request, as far as a picture model has it, with its own options."""

    modalities: list[Literal["text", "image"]] | None = Field(default=None, min_length=1)
    """Must name `image` if anything; a `text` beside it is not written, as by other servers."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
