"""Transcription: vLLM's serving class, with our bounds on the file and our error answers."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
    TranscriptionResponseVariant,
)
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription

from vllm_omni.engine.ar_speech import DECODER_PROMPT, MIN_AUDIO_S, with_decoder_prompt
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media.decode import AudioLimits, decode_audio
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.entrypoints.openai.request_scope import EventStream, RequestScope
from vllm_omni.entrypoints.openai.serving import OmniErrorsMixin, answer_of
from vllm_omni.entrypoints.openai.transcriptions.stream import with_openai_events
from vllm_omni.errors import BadRequestError

if TYPE_CHECKING:
    import numpy as np
    from fastapi import Request
    from numpy.typing import NDArray
    from vllm.config.speech_to_text import SpeechToTextParams
    from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextSegment
    from vllm.inputs import PromptType
    from vllm.model_executor.models.interfaces import SupportsTranscription


class OmniServingTranscription(OmniErrorsMixin, OpenAIServingTranscription):  # type: ignore[misc]
    """One instance serves; a shallow copy of it is bound to each request."""

    engine_client: OmniEngineClient
    _duration_s = math.inf
    """Of the recording, in a bound copy."""

    def __init__(
        self, limits: AudioLimits, *, settings: Mapping[str, object], **kwargs: Any
    ) -> None:
        """`settings` are the stage's own: the `language` of a request that names none, and the
        `decoder_prompt` of a checkpoint that was trained without language and task tokens."""
        self.limits = limits
        self._settings = settings
        super().__init__(**kwargs)

    async def create(
        self, data: bytes, request: TranscriptionRequest, raw_request: Request
    ) -> TranscriptionResponseVariant | EventStream:
        """Transcribe a file; a stream is returned when its first output is there."""
        if request.language is None and (language := self._settings.get("language")):
            request.language = str(language)
        if request.response_format == "verbose_json" and not self._has_timestamps:
            raise BadRequestError(
                "this model's recogniser has no timestamps; use json or text",
                field="response_format",
            )
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
        return EventStream(with_openai_events(answer), scope)

    @functools.cached_property
    def model_cls(self) -> type[SupportsTranscription]:
        """The recogniser's class, with the checkpoint's own decoder prompt when it has one."""
        model_class: type[SupportsTranscription] = super().model_cls
        own = self._settings.get(DECODER_PROMPT)
        return model_class if own is None else prompted_class(model_class, str(own))

    @functools.cached_property
    def _has_timestamps(self) -> bool:
        """The tokenizer knows times as tokens of their own, which vLLM takes for granted."""
        if not self.model_cls.supports_segment_timestamp:
            return False
        return len(self.tokenizer.encode("<|0.00|>", add_special_tokens=False)) == 1

    async def _preprocess_speech_to_text(self, *args: Any, **kwargs: Any) -> Any:
        prompts, duration_s, starts_s = await super()._preprocess_speech_to_text(*args, **kwargs)
        self._duration_s = duration_s
        return prompts, duration_s, starts_s

    def _get_verbose_segments(self, *args: Any, **kwargs: Any) -> list[SpeechToTextSegment]:
        """Segments within the recording: a recogniser's window is longer, and so may its times."""
        segments: list[SpeechToTextSegment] = super()._get_verbose_segments(*args, **kwargs)
        for segment in segments:
            segment.start = min(segment.start, self._duration_s)
            segment.end = min(segment.end, self._duration_s)
        return segments

    def _decode_and_chunk_speech(
        self, audio_data: bytes
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Decode within our limits, then let vLLM resample and cut. Runs in vLLM's pool."""
        import soundfile

        audio = decode_audio(EncodedMedia(audio_data, "file"), self.limits)
        if len(audio.samples) < MIN_AUDIO_S * audio.sample_rate_hz:
            raise BadRequestError(f"the recording is shorter than {MIN_AUDIO_S} s", field="file")
        buffer = io.BytesIO()
        soundfile.write(buffer, audio.samples, audio.sample_rate_hz, format="WAV", subtype="FLOAT")
        chunks, duration_s = super()._decode_and_chunk_speech(buffer.getvalue())
        return chunks, duration_s


def prompted_class(
    model_class: type[SupportsTranscription], decoder_prompt: str
) -> type[SupportsTranscription]:
    """A speech model's class for a checkpoint with a decoder prompt of its own."""

    class Prompted(model_class):  # type: ignore[misc,valid-type]
        @classmethod
        def get_generation_prompt(cls, stt_params: SpeechToTextParams) -> PromptType:
            return with_decoder_prompt(super().get_generation_prompt(stt_params), decoder_prompt)

    return Prompted
