"""One request to the engine as the serving classes see it: text for vLLM's, audio for ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_omni.config.pipeline import Modality
from vllm_omni.inputs.prompt import AudioInput
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from vllm import RequestOutput


class RequestStream:
    """Outputs of one engine request, in order. Closing it aborts the request in every stage."""

    def __init__(self, outputs: AsyncGenerator[OmniRequestOutput, None]) -> None:
        self._outputs = outputs
        self._first: OmniRequestOutput | None = None
        self.audio: dict[int, AudioChunk] = {}
        """All samples by choice, collected by `text_outputs`."""

    async def prime(self) -> None:
        """Wait for the first output, so that an early error still has a status code."""
        self._first = await anext(self._outputs, None)

    async def outputs(self) -> AsyncGenerator[OmniRequestOutput, None]:
        async with aclosing(self._outputs) as rest:
            if self._first is not None:
                first, self._first = self._first, None
                yield first
            async for output in rest:
                yield output

    async def text_outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs alone; audio is collected beside them."""
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                if output.audio is not None:
                    self._collect(output.index, output.audio)
                if output.request_output is not None:
                    yield output.request_output

    async def aclose(self) -> None:
        await self._outputs.aclose()

    def _collect(self, index: int, chunk: AudioChunk) -> None:
        before = self.audio.get(index)
        self.audio[index] = chunk if before is None else before.merged_with(chunk)


@dataclass(slots=True)
class RequestScope:
    """What one HTTP request brings beyond the prompt, and the engine requests made for it."""

    outputs: frozenset[Modality] = frozenset({Modality.TEXT})
    audio: tuple[AudioInput, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)
    """By stage name, for stages beside the one that serves the text."""
    streams: list[RequestStream] = field(default_factory=list)

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

    events: AsyncGenerator[str, None]
    scope: RequestScope
