"""What one HTTP request asks of the engine: text for vLLM's serving classes, audio for ours."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.sampling_params import RequestOutputKind

from vllm_omni.config.pipeline import Modality, PipelineConfig
from vllm_omni.inputs.prompt import AudioInput
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


class RequestStream:
    """Outputs of one engine request, in order. Closing it aborts the request in every stage."""

    def __init__(
        self, outputs: AsyncGenerator[OmniRequestOutput, None], params: SamplingParams
    ) -> None:
        self._outputs = outputs
        self._first: OmniRequestOutput | None = None
        self._reader: asyncio.Task[object] | None = None
        """Who waits for the next output."""
        self._has_no_reader = asyncio.Event()
        # vLLM's serving expects all choices of a whole answer in one output.
        self._joins_choices = params.n > 1 and params.output_kind is RequestOutputKind.FINAL_ONLY
        self._audio: dict[int, list[AudioChunk]] = {}

    async def prime(self) -> None:
        """Wait for the first output, so that an early error still has a status code."""
        if self._first is None:
            self._first = await self._next()

    async def outputs(self) -> AsyncGenerator[OmniRequestOutput, None]:
        async with aclosing(self._outputs):
            if self._first is not None:
                first, self._first = self._first, None
                yield first
            while (output := await self._next()) is not None:
                yield output

    async def _next(self) -> OmniRequestOutput | None:
        """The next output; None after the last."""
        self._reader = asyncio.current_task()
        self._has_no_reader.clear()
        try:
            return await anext(self._outputs, None)
        finally:
            self._reader = None
            self._has_no_reader.set()

    async def text_outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs alone; audio is collected beside them."""
        whole: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                if output.audio is not None:
                    self._audio.setdefault(output.index, []).append(output.audio)
                if output.request_output is None:
                    continue
                if self._joins_choices:
                    whole[output.index] = output.request_output
                else:
                    yield output.request_output
        if whole:
            yield _joined([whole[index] for index in sorted(whole)])

    def audio_of(self, index: int) -> AudioChunk | None:
        """All samples of a choice that `text_outputs` collected."""
        chunks = self._audio.get(index)
        if not chunks:
            return None
        return AudioChunk(b"".join(chunk.pcm for chunk in chunks), chunks[0].sample_rate_hz)

    async def aclose(self) -> None:
        """End the request, whoever reads it: of several prompts in one HTTP request one may have
        failed, and vLLM leaves the readers of the others cancelled but not yet ended."""
        if self._reader is not None:
            self._reader.cancel()
            await self._has_no_reader.wait()
        await self._outputs.aclose()


@dataclass(slots=True)
class RequestScope:
    """What one HTTP request brings beyond the prompt, and the engine requests made for it."""

    outputs: frozenset[Modality] = frozenset({Modality.TEXT})
    audio: tuple[AudioInput, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)
    """By stage name, for stages beside the one that serves the text and those that speak."""
    speech: SpeechParams | None = None
    """For the stages that speak."""
    streams: list[RequestStream] = field(default_factory=list)

    def params_list(self, pipeline: PipelineConfig) -> list[object] | None:
        """`params` as `AsyncOmni` takes them; None when there are none."""
        if not self.params:
            return None
        return [self.params.get(stage.name) for stage in pipeline.stages]

    async def prime(self) -> None:
        """Wait for the first output of all that runs; on an error nothing is left running."""
        tasks = [asyncio.ensure_future(stream.prime()) for stream in self.streams]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Abort what still runs."""
        for stream in self.streams:
            await stream.aclose()


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events of one HTTP request, and what runs behind them."""

    events: AsyncGenerator[str | bytes, None]
    scope: RequestScope


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    """One output with the choices of all."""
    joined = copy.copy(outputs[0])
    joined.outputs = [choice for output in outputs for choice in output.outputs]
    return joined
