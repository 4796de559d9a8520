"""Speak a text: checks, the engine's chunks, and their framing as events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.entrypoints.openai.events import MediaEvents
from vllm_omni.entrypoints.openai.media.encode import (
    SPEECH_FORMATS,
    AudioFormat,
    encode_chunk,
    encode_file,
    encode_stream,
    find_format,
)
from vllm_omni.entrypoints.openai.media.playback import Playback
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.models.serving import OmniModels
from vllm_omni.entrypoints.openai.responses import primed
from vllm_omni.entrypoints.openai.speech.protocol import SpeechRequest
from vllm_omni.errors import BadRequestError, OmniError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

_DELTAS: Final = MediaEvents({"type": "speech.audio.delta", "audio": ""}, "audio")


@dataclass(frozen=True, slots=True)
class Speech:
    """A text that is being spoken; its first samples are there."""

    form: AudioFormat
    outputs: AsyncGenerator[OmniRequestOutput, None]
    """All have samples."""
    sample_rate_hz: int
    """Of the samples, for raw PCM that has no header to name it."""
    num_characters: int


class SpeechServing:
    """Knows no HTTP: typed requests in, samples, bytes or events out."""

    def __init__(
        self,
        omni: AsyncOmni,
        capabilities: Capabilities,
        models: OmniModels,
        pool: MediaPool,
        limits: ServerLimits,
    ) -> None:
        self._omni = omni
        self._capabilities = capabilities
        self._models = models
        self._pool = pool
        self._limits = limits

    async def start(self, request: SpeechRequest) -> Speech:
        """Begin to speak; returns when the first samples are there.

        Raises:
            OmniError, AnsweredError: nothing is left running.
        """
        form, params = self._checked(request)
        prompt = OmniPrompt(text=request.input)
        first, outputs = await primed(self._outputs(prompt, params))
        if first is None or first.audio is None:
            raise BadRequestError("input has nothing that can be spoken", field="input")
        return Speech(form, outputs, first.audio.sample_rate_hz, len(request.input))

    async def file(self, speech: Speech) -> bytes:
        """All of it as one file with exact lengths."""
        async with aclosing(speech.outputs) as outputs:
            parts = [output.audio async for output in outputs if output.audio is not None]
        whole = AudioChunk(b"".join(part.pcm for part in parts), speech.sample_rate_hz)
        return await self._pool.run(encode_file, speech.form, whole)

    def stream(self, speech: Speech) -> AsyncGenerator[bytes, None]:
        """Bytes of one file, as they are made."""
        return encode_stream(self._played(speech), speech.form, self._pool)

    async def events(self, speech: Speech) -> AsyncGenerator[str | bytes, None]:
        """`speech.audio.delta` events, then `speech.audio.done`; an error is an event too."""
        encoder = speech.form.encoder()
        duration_s = 0.0
        try:
            async with aclosing(self._played(speech)) as chunks:
                async for chunk in chunks:
                    duration_s += chunk.duration_s
                    if data := await encode_chunk(encoder, chunk, self._pool):
                        yield _DELTAS.event(data)
            if data := await encode_chunk(encoder, None, self._pool):
                yield _DELTAS.event(data)
        except OmniError as exc:
            yield describe(exc).event()
            return
        # A voice has no tokens: characters in, and seconds out, are what it costs.
        usage = {
            "input_tokens": speech.num_characters,
            "output_tokens": 0,
            "total_tokens": speech.num_characters,
            "audio_seconds": round(duration_s, 3),
        }
        yield _event({"type": "speech.audio.done", "usage": usage})

    async def _played(self, speech: Speech) -> AsyncGenerator[AudioChunk, None]:
        """The samples of a stream, to which somebody listens."""
        playback = Playback(self._omni.metrics)
        async with aclosing(speech.outputs) as outputs:
            async for output in outputs:
                if output.audio is not None:
                    playback.sending(output)
                    yield output.audio

    def _checked(self, request: SpeechRequest) -> tuple[AudioFormat, SpeechParams]:
        self._models.check_name(request.model)
        if Task.SPEECH not in self._capabilities.pipeline.entries:
            raise BadRequestError("this model has no task 'speech'", field="model")
        if not request.input.strip():
            raise BadRequestError("input must not be empty", field="input")
        limit = self._limits.max_speech_chars
        if len(request.input) > limit:
            raise BadRequestError(
                f"input has {len(request.input)} characters, at most {limit} are allowed",
                field="input",
            )
        if request.instructions:
            raise BadRequestError("this model's voices take no instructions", field="instructions")
        form = find_format(request.response_format, SPEECH_FORMATS, "response_format")
        voice = self._capabilities.check_voice(request.voice_name, "voice")
        return form, SpeechParams(voice=voice, speed=request.speed, seed=request.seed)

    async def _outputs(
        self, prompt: OmniPrompt, params: SpeechParams
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        outputs = self._omni.generate(
            prompt,
            request_id=f"speech-{uuid4().hex}",
            task=Task.SPEECH,
            speech=params,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.audio is not None and output.audio.num_samples:
                    yield output


def _event(value: dict[str, object]) -> str:
    return f"data: {json.dumps(value)}\n\n"
