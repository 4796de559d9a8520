"""Responses close what feeds them, by themselves and at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from vllm_omni.entrypoints.openai.responses import StreamedResponse, primed, until_disconnect
from vllm_omni.errors import RequestFailedError

SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/audio/speech", "method": "POST"}


class Source:
    """What runs behind a body."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def aclose(self) -> None:
        self.num_closed += 1


class Wire:
    """The server's side of one connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def has_ended(self) -> bool:
        return self.sent[-1].get("more_body") is False


class Body:
    """A body whose generator somebody else holds on to, so that only `aclose` can close it."""

    def __init__(self, *parts: bytes, error: Exception | None = None, waits: bool = False) -> None:
        self.is_closed = False
        self.begun = asyncio.Event()
        self.generator = self._make(parts, error, waits)

    async def _make(
        self, parts: tuple[bytes, ...], error: Exception | None, waits: bool
    ) -> AsyncGenerator[bytes, None]:
        try:
            for part in parts:
                yield part
            self.begun.set()
            if waits:
                await asyncio.Event().wait()
            if error is not None:
                raise error
        finally:
            self.is_closed = True


def response(body: Body, source: Source) -> StreamedResponse:
    return StreamedResponse(body.generator, source=source, media_type="audio/pcm")


async def test_a_body_that_ends_is_ended_properly() -> None:
    body, source, wire = Body(b"a", b"b"), Source(), Wire()

    await response(body, source)(SCOPE, wire.receive, wire.send)

    assert wire.body == b"ab"
    assert wire.has_ended
    assert body.is_closed
    assert source.num_closed == 1


async def test_leaving_closes_body_and_source_before_it_returns() -> None:
    body, source, wire = Body(b"a", waits=True), Source(), Wire()

    running = asyncio.create_task(response(body, source)(SCOPE, wire.receive, wire.send))
    await body.begun.wait()
    wire.gone.set()
    await running

    assert body.is_closed
    assert source.num_closed == 1
    assert not wire.has_ended


async def test_a_body_that_was_never_begun_still_closes_its_source() -> None:
    body, source, wire = Body(b"a", waits=True), Source(), Wire()
    wire.gone.set()

    async def never(message: Any) -> None:
        await asyncio.Event().wait()

    await response(body, source)(SCOPE, wire.receive, never)

    assert source.num_closed == 1


async def test_cancelling_the_handler_closes_too() -> None:
    body, source, wire = Body(b"a", waits=True), Source(), Wire()

    running = asyncio.create_task(response(body, source)(SCOPE, wire.receive, wire.send))
    await body.begun.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert body.is_closed
    assert source.num_closed == 1


async def test_a_failed_request_breaks_the_body_off() -> None:
    body, source, wire = Body(b"a", error=RequestFailedError("it broke")), Source(), Wire()

    await response(body, source)(SCOPE, wire.receive, wire.send)

    assert wire.body == b"a"
    assert not wire.has_ended
    assert source.num_closed == 1


async def test_a_bug_in_a_body_is_not_swallowed() -> None:
    body, source, wire = Body(b"a", error=KeyError("bug")), Source(), Wire()

    with pytest.raises(KeyError):
        await response(body, source)(SCOPE, wire.receive, wire.send)
    assert source.num_closed == 1


async def test_priming_raises_early_and_closes() -> None:
    body = Body(error=RequestFailedError("it broke"))

    with pytest.raises(RequestFailedError):
        await primed(body.generator)
    assert body.is_closed


async def test_priming_keeps_the_first_item() -> None:
    first, stream = await primed(Body(b"a", b"b").generator)
    nothing, empty = await primed(Body().generator)

    assert first == b"a"
    assert [item async for item in stream] == [b"a", b"b"]
    assert nothing is None
    assert [item async for item in empty] == []


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    wire, begun, ended = Wire(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(until_disconnect(Request(SCOPE, wire.receive), work()))
    await begun.wait()
    wire.gone.set()

    with pytest.raises(ClientDisconnect):
        await waiting
    assert ended.is_set()
