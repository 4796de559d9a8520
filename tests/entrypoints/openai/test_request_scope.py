"""An HTTP request that ends while its engine requests are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from vllm import SamplingParams

from vllm_omni.entrypoints.openai.request_scope import RequestScope, RequestStream


class Engine:
    """A request whose output never comes; says when it was ended."""

    def __init__(self) -> None:
        self.has_ended = False

    async def outputs(self) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.get_running_loop().create_future()
            yield None
        finally:
            self.has_ended = True


async def reading(stream: RequestStream) -> asyncio.Task[Any]:
    """Somebody who waits for the first output."""
    task: asyncio.Task[Any] = asyncio.ensure_future(anext(stream.text_outputs()))
    await asyncio.sleep(0)
    return task


async def test_a_scope_that_closes_ends_who_still_reads() -> None:
    engines = [Engine(), Engine(), Engine()]
    streams = [RequestStream(engine.outputs(), SamplingParams()) for engine in engines]
    cancelled, waiting = await reading(streams[0]), await reading(streams[1])
    cancelled.cancel()  # it has not run since

    await RequestScope(streams=streams).aclose()

    assert [engine.has_ended for engine in engines] == [True, True, False]  # nobody asked the last
    results = await asyncio.gather(cancelled, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2


async def test_a_stream_that_nobody_reads_any_more_is_closed() -> None:
    engine = Engine()
    stream = RequestStream(engine.outputs(), SamplingParams())
    task = await reading(stream)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    await stream.aclose()

    assert engine.has_ended
