"""Chat completions: vLLM's serving class for the text, with audio read, spoken and framed here."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from vllm_omni.config.pipeline import Modality, StageKind, Task, plan_route
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.chat.deltas import PlainAnswer, is_plain
from vllm_omni.entrypoints.openai.chat.parts import MediaPart, find_media, refuse_placeholder
from vllm_omni.entrypoints.openai.chat.protocol import AudioOptions, OmniChatRequest
from vllm_omni.entrypoints.openai.chat.renderer import ChatRenderer
from vllm_omni.entrypoints.openai.chat.stream import SpokenAnswer, new_audio_id
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media.connector import AttachedMediaStore
from vllm_omni.entrypoints.openai.media.encode import (
    CHAT_FORMATS,
    AudioFormat,
    encode_base64,
    find_format,
)
from vllm_omni.entrypoints.openai.media.loader import MediaLoader
from vllm_omni.entrypoints.openai.media.playback import Playback
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.params import (
    LIST_FIELD,
    apply_to_request,
    check_list,
    check_processor_options,
    merge_speech,
    stage_params,
)
from vllm_omni.entrypoints.openai.request_scope import EventStream, RequestScope
from vllm_omni.entrypoints.openai.serving import OmniErrorsMixin, answer_of, parse_model
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.speech import SpeechParams

if TYPE_CHECKING:
    from fastapi import Request
    from vllm import RequestOutput


@dataclass(frozen=True, slots=True)
class ChatMedia:
    """What chat needs beside vLLM's serving class."""

    capabilities: Capabilities
    store: AttachedMediaStore
    pool: MediaPool
    metrics: EngineMetrics

    @property
    def loader(self) -> MediaLoader:
        return self.store.loader


@dataclass(frozen=True, slots=True)
class _Spoken:
    """How one answer is spoken."""

    form: AudioFormat
    with_text: bool


class OmniServingChat(OmniErrorsMixin, OpenAIServingChat):  # type: ignore[misc]
    """One instance serves; a shallow copy of it is bound to each request."""

    engine_client: OmniEngineClient

    def __init__(self, media: ChatMedia, **kwargs: Any) -> None:
        made = kwargs["online_renderer"]
        self._checks_options = not made.trust_request_mm_kwargs
        super().__init__(**{**kwargs, "online_renderer": ChatRenderer.of(made)})
        self._media = media
        self._scope = RequestScope()
        self._spoken: _Spoken | None = None
        self._tells_more = bool(
            self.parser_cls or self.enable_log_outputs or self.enable_force_include_usage
        )
        self._speaks_tokens = self.parser_cls is not None and self._include_reasoning_tokens_details
        stage = media.capabilities.pipeline.stages[self._stage_id]
        self.default_sampling_params: dict[str, Any] = {
            **self.model_config.get_diff_sampling_param(),
            **stage.default_params,
        }

    @property
    def _stage_id(self) -> int:
        return self._media.capabilities.pipeline.stage_id(self.engine_client.stage)

    async def create(
        self, body: dict[str, Any], raw_request: Request
    ) -> ChatCompletionResponse | EventStream:
        """Answer a chat request; a stream is returned when its first output is there.

        Raises:
            OmniError, AnsweredError: nothing was sent and nothing is left running.
        """
        parts = find_media(body.get("messages"), self._media.capabilities.chat_inputs)
        self._media.loader.check([part.source for part in parts])
        native = self._media.capabilities.native_inputs
        left = [part for part in parts if part.source.kind in native]
        heard = [part for part in parts if part.source.kind not in native]
        with self._media.store.attach([part.source for part in left]) as attached:
            self._put_placeholders(body, heard)
            for i, part in enumerate(left):
                part.replace_by_url(attached.handle(i))
            request = parse_model(OmniChatRequest, body)
            bound = self._bound_to(request, parts)
            self.engine_client.check_places(request.n or 1, "n")
            bound._scope.audio = await self._media.loader.load([part.source for part in heard])
            return await bound._answer(request, raw_request)

    async def _answer(
        self, request: OmniChatRequest, raw_request: Request
    ) -> ChatCompletionResponse | EventStream:
        """Render, start, and wait for the whole answer or for the first output of a stream."""
        try:
            answer = answer_of(await self.create_chat_completion(request, raw_request))
            if isinstance(answer, ChatCompletionResponse):
                await self._speak(answer)
                return answer
            await self._scope.prime()
        except BaseException:
            await self._scope.aclose()
            raise
        return EventStream(answer, self._scope)

    def _put_placeholders(self, body: dict[str, Any], heard: Sequence[MediaPart]) -> None:
        """Mark the place of media that another stage turns into text."""
        placeholder = self._media.capabilities.pipeline.placeholders.get(Modality.AUDIO)
        if placeholder is None:
            return
        for part in heard:
            part.replace({"type": "text", "text": ""})
        refuse_placeholder(body, placeholder)
        for part in heard:
            part.replace({"type": "text", "text": placeholder})

    def _bound_to(self, request: OmniChatRequest, parts: list[MediaPart]) -> OmniServingChat:
        """A copy for one request, with everything that can be refused refused."""
        capabilities = self._media.capabilities
        pipeline = capabilities.pipeline
        outputs = capabilities.check_outputs(request.modalities)
        if self._checks_options:
            check_processor_options(request, capabilities.native_inputs)
        options = request.audio or AudioOptions()
        form = find_format(options.format, CHAT_FORMATS, "audio.format")
        voice = options.voice_name
        if request.audio is not None or Modality.AUDIO in outputs:
            voice = capabilities.check_voice(voice, "audio.voice")
        inputs = frozenset(part.source.kind for part in parts)
        # The words come with the audio always: they are its transcript and its finish.
        wanted = outputs | {Modality.TEXT}
        plan_route(pipeline, Task.CHAT, inputs, wanted)
        check_list(request.sampling_params_list, pipeline)
        entries = request.sampling_params_list or [None] * len(pipeline.stages)
        apply_to_request(request, entries[self._stage_id], self._stage_id)
        speech = SpeechParams(voice=voice, seed=request.seed)
        params: dict[str, object] = {}
        for i, stage in enumerate(pipeline.stages):
            if i == self._stage_id or not (entry := entries[i]):
                continue
            if stage.kind is StageKind.ONE_SHOT:
                speech = merge_speech(speech, entry, f"{LIST_FIELD}[{i}]")
                capabilities.check_voice(speech.voice, f"{LIST_FIELD}[{i}].voice")
            else:
                params[stage.name] = stage_params(stage, entry, i)
        bound = copy.copy(self)
        if Modality.AUDIO in outputs:
            self._check_spoken(request)
            bound._spoken = _Spoken(form, Modality.TEXT in outputs)
        bound._scope = RequestScope(wanted, (), params, speech)
        bound.engine_client = self.engine_client.for_request(bound._scope)
        return bound

    def _check_spoken(self, request: OmniChatRequest) -> None:
        """Refuse what would be spoken though it is not meant to be heard."""
        if request.tools and request.tool_choice != "none":
            raise BadRequestError(
                "audio and tools do not go together: a tool call would be spoken; "
                "ask for text, or set tool_choice to 'none'",
                field="tools",
            )
        if self._speaks_tokens:
            raise BadRequestError(
                "this server separates reasoning from the answer, and reasoning would be spoken; "
                "ask for text",
                field="modalities",
            )
        if request.use_beam_search:
            raise BadRequestError(
                "audio and beam search do not go together", field="use_beam_search"
            )

    def chat_completion_stream_generator(
        self,
        request: OmniChatRequest,
        result_generator: AsyncGenerator[RequestOutput, None],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str | bytes, None]:
        """vLLM's events, with audio between them when the answer is spoken."""
        write = super().chat_completion_stream_generator

        def written(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[str, None]:
            events: AsyncGenerator[str, None] = write(
                request, outputs, request_id, model_name, *args, **kwargs
            )
            return events

        def text_events(
            outputs: AsyncGenerator[RequestOutput, None],
        ) -> AsyncGenerator[str | bytes, None]:
            if self._tells_more or not is_plain(request):
                return written(outputs)
            plain = PlainAnswer(request_id, model_name, self.get_chat_request_role(request))
            return plain.events(outputs, written)

        if self._spoken is None:
            return text_events(result_generator)
        answer = SpokenAnswer(
            request_id=request_id,
            model=model_name,
            num_choices=request.n or 1,
            with_text=self._spoken.with_text,
            form=self._spoken.form,
            pool=self._media.pool,
            playback=Playback(self._media.metrics),
        )
        (stream,) = self._scope.streams
        return answer.events(text_events(answer.text_outputs(stream)))

    async def _speak(self, response: ChatCompletionResponse) -> None:
        """Put the audio into the choices of a whole answer."""
        if self._spoken is None:
            return
        (stream,) = self._scope.streams
        for choice in response.choices:
            audio = stream.audio_of(choice.index)
            if audio is None or not audio.num_samples:
                continue  # nothing to hear: its words stay where a text has them
            choice.message.audio = ChatCompletionAudio(
                id=new_audio_id(),
                data=await self._media.pool.run(encode_base64, self._spoken.form, audio),
                expires_at=int(time.time()),
                transcript=choice.message.content or "",
            )
            if not self._spoken.with_text:
                choice.message.content = None
