"""What a chat request may ask for beyond vLLM's own fields, and the shape of audio answers."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest


class VoiceRef(BaseModel):
    """A voice by id, as newer clients send it."""

    model_config = ConfigDict(extra="forbid")

    id: str


class AudioOptions(BaseModel):
    """How the answer is spoken."""

    model_config = ConfigDict(extra="forbid")

    voice: str | VoiceRef = "default"
    format: str = "wav"

    @property
    def voice_name(self) -> str:
        return self.voice if isinstance(self.voice, str) else self.voice.id


class OmniChatRequest(ChatCompletionRequest):
    """vLLM's chat request with OpenAI's audio fields."""

    modalities: list[str] | None = None
    """Modalities of the answer; text alone unless said otherwise."""
    audio: AudioOptions | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = Field(default=None, max_length=64)
    """One entry for each stage of the pipeline, in its order; null leaves the stage's defaults.
    For the stage that reads the prompt, fields of the request itself win."""


OMNI_FIELDS: Final = tuple(OmniChatRequest.model_fields.keys() - ChatCompletionRequest.model_fields)
"""Fields of ours that vLLM's other routes do not know."""
SAMPLING_FIELDS: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Sampling fields a client may set for a text stage by `sampling_params_list`."""
