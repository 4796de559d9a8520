"""What a speech request may ask for. Unknown fields are refused: nothing is ignored in silence."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni.entrypoints.openai.chat.protocol import VoiceRef


class SpeechRequest(BaseModel):
    """OpenAI's speech request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    input: str
    voice: str | VoiceRef = "default"
    response_format: str = "mp3"
    speed: float = Field(default=1.0, ge=0.25, le=4.0, allow_inf_nan=False)
    instructions: str | None = None
    stream_format: Literal["audio", "sse"] | None = None
    """None: as it is made, unless the format's header names the length (wav, flac)."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)

    @property
    def voice_name(self) -> str:
        return self.voice if isinstance(self.voice, str) else self.voice.id
