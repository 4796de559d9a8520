"""Transcription: vLLM's serving class, with our bounds on the file and our error answers."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
    TranscriptionResponseVariant,
)
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media.decode import AudioLimits, decode_audio
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.entrypoints.openai.request_scope import EventStream, RequestScope
from vllm_omni.entrypoints.openai.serving import OmniErrorsMixin, answer_of

if TYPE_CHECKING:
    import numpy as np
    from fastapi import Request
    from numpy.typing import NDArray


class OmniServingTranscription(OmniErrorsMixin, OpenAIServingTranscription):  # type: ignore[misc]
    """One instance serves; a shallow copy of it is bound to each request."""

    engine_client: OmniEngineClient

    def __init__(
        self, limits: AudioLimits, *, default_language: str | None = None, **kwargs: Any
    ) -> None:
        """`default_language` is what a request without one speaks; None: vLLM listens for it."""
        self.limits = limits
        self.default_language = default_language
        super().__init__(**kwargs)

    async def create(
        self, data: bytes, request: TranscriptionRequest, raw_request: Request
    ) -> TranscriptionResponseVariant | EventStream:
        """Transcribe a file; a stream is returned when its first output is there."""
        request.language = request.language or self.default_language
        scope = RequestScope()
        bound = copy.copy(self)
        bound.engine_client = self.engine_client.for_request(scope)
        try:
            answer = answer_of(await bound.create_transcription(data, request, raw_request))
            if isinstance(answer, TranscriptionResponseVariant):
                return answer
            await scope.prime()
        except BaseException:
            await scope.aclose()
            raise
        return EventStream(answer, scope)

    def _decode_and_chunk_speech(
        self, audio_data: bytes
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Decode within our limits, then let vLLM resample and cut. Runs in vLLM's pool."""
        import soundfile

        audio = decode_audio(EncodedMedia(audio_data, "file"), self.limits)
        buffer = io.BytesIO()
        soundfile.write(buffer, audio.samples, audio.sample_rate_hz, format="WAV", subtype="FLOAT")
        chunks, duration_s = super()._decode_and_chunk_speech(buffer.getvalue())
        return chunks, duration_s
