"""One stream of server-sent events with the text and the audio of an answer, as each comes.

vLLM's generator, or ours of plain answers, writes the text events. It pulls from `text_outputs`,
which walks the request's outputs in order: audio becomes events on the spot, text is handed on.
Both meet in one short queue, so order is kept and a slow client holds up the walk instead of
growing a buffer.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vllm_omni.entrypoints.openai.events import MediaEvents
from vllm_omni.entrypoints.openai.media.encode import AudioEncoder, AudioFormat, encode_chunk
from vllm_omni.entrypoints.openai.media.playback import Playback
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.request_scope import RequestStream
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.outputs import CompletionOutput

_QUEUED_EVENTS: Final = 4


def new_audio_id() -> str:
    """Id of one spoken answer."""
    return f"audio_{uuid.uuid4().hex}"


class SpokenAnswer:
    """The events of one answer, all its choices included."""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        num_choices: int,
        with_text: bool,
        form: AudioFormat,
        pool: MediaPool,
        playback: Playback,
    ) -> None:
        self._envelope = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._with_text = with_text
        self._pool = pool
        self._playback = playback
        self._encoders: dict[int, AudioEncoder] = {i: form.encoder() for i in range(num_choices)}
        self._heard: set[int] = set()
        """Choices of which there was audio."""
        self._deltas: dict[int, MediaEvents] = {}
        """Events of audio by choice, as long as the envelope does not change."""
        self._audio_ids = [new_audio_id() for _ in range(num_choices)]
        self._events: asyncio.Queue[str | bytes | None] = asyncio.Queue(_QUEUED_EVENTS)

    async def text_outputs(self, stream: RequestStream) -> AsyncGenerator[RequestOutput, None]:
        """Text for its events. A choice's finish is held back until all audio was sent."""
        held: dict[int, CompletionOutput] = {}
        last: RequestOutput | None = None
        async with aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                if output.request_output is not None:
                    last = output.request_output
                    yield _without_finish(last, held)
                if output.audio is not None:
                    await self._send_audio(output, output.audio)
        for index in self._encoders:
            await self._end_audio(index)
        if last is not None and held:
            yield _with_outputs(last, [held[index] for index in sorted(held)])

    async def events(
        self, text_events: AsyncGenerator[str | bytes, None]
    ) -> AsyncGenerator[str | bytes, None]:
        """All events in order. Closing this closes `text_events` and what feeds it."""
        producing = asyncio.create_task(self._produce(text_events))
        try:
            while (event := await self._events.get()) is not None:
                yield event
            await producing
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def _produce(self, text_events: AsyncGenerator[str | bytes, None]) -> None:
        try:
            async with aclosing(text_events):
                async for event in text_events:
                    await self._events.put(self._with_transcript(event))
        except asyncio.CancelledError:
            raise
        except BaseException:
            await self._events.put(None)
            raise
        await self._events.put(None)

    async def _send_audio(self, output: OmniRequestOutput, chunk: AudioChunk) -> None:
        if not chunk.num_samples:
            return
        index = output.index
        self._heard.add(index)
        data = await encode_chunk(self._encoders[index], chunk, self._pool)
        self._playback.sending(output)
        if data:
            await self._send_data(index, data)

    async def _end_audio(self, index: int) -> None:
        if index not in self._heard:
            return  # a file of no samples is no answer
        if data := await encode_chunk(self._encoders[index], None, self._pool):
            await self._send_data(index, data)
        # Nothing is kept for later turns: it has expired when it was sent.
        expiry = self._chunk(index, {"expires_at": int(time.time())})
        await self._events.put(f"data: {json.dumps(expiry)}\n\n")

    async def _send_data(self, index: int, data: bytes) -> None:
        deltas = self._deltas.get(index)
        if deltas is None:
            deltas = self._deltas[index] = MediaEvents(self._chunk(index, {"data": ""}), "data")
        await self._events.put(deltas.event(data))

    def _chunk(self, index: int, audio: Mapping[str, object]) -> dict[str, object]:
        delta = {"audio": {"id": self._audio_ids[index], **audio}}
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return {**self._envelope, "choices": [choice]}

    def _with_transcript(self, event: str | bytes) -> str | bytes:
        """The text event with its words as transcript, and as content when text was asked for."""
        line = event.encode() if isinstance(event, str) else event
        if not line.startswith(b"data: {"):
            return line
        chunk: dict[str, Any] = msgspec.json.decode(line[6:])
        created = chunk.get("created", self._envelope["created"])
        if created != self._envelope["created"]:
            self._envelope["created"] = created
            self._deltas.clear()
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            content = delta.get("content") if self._with_text else delta.pop("content", None)
            if content or "role" in delta:
                index = choice["index"]
                delta["audio"] = {"id": self._audio_ids[index], "transcript": content or ""}
        return b"".join([b"data: ", msgspec.json.encode(chunk), b"\n\n"])


def _without_finish(output: RequestOutput, held: dict[int, CompletionOutput]) -> RequestOutput:
    """The output with choices that still run; their finish goes to `held`."""
    running = []
    for choice in output.outputs:
        # An error must not wait for audio that may never come.
        if choice.finish_reason is None or choice.finish_reason == "error":
            running.append(choice)
            continue
        held[choice.index] = dataclasses.replace(
            choice, text="", token_ids=(), logprobs=None if choice.logprobs is None else []
        )
        running.append(dataclasses.replace(choice, finish_reason=None, stop_reason=None))
    return _with_outputs(output, running)


def _with_outputs(output: RequestOutput, choices: list[CompletionOutput]) -> RequestOutput:
    changed = copy.copy(output)
    changed.outputs = choices
    return changed
