"""Responses that own what they send: closed explicitly, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from vllm_omni.errors import BadRequestError, OmniError

logger = logging.getLogger(__name__)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_FIELDS: Final = 1_000
MAX_VALUES: Final = 262_144
"""Of a body, at whatever depth; a prompt of token ids has one for each."""
_MAX_COMMAS: Final = 4_000_000
"""Seen before anything is decoded; commas in texts count here too."""

counted: Callable[[F], F] = load_aware_call
"""Counts a handler's requests for /load, when vLLM was told to."""


class Closable(Protocol):
    """Whatever must be closed when a response is over."""

    async def aclose(self) -> None: ...


class JsonAnswer(JSONResponse):
    """JSON of an answer that may hold megabytes of base64: encoded faster than by `json`."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class StreamedResponse(StreamingResponse):
    """A body made while it is sent. When the client leaves, its generator is closed at once.

    An `OmniError` after the first byte breaks the body off: the client sees no proper end.
    """

    body_iterator: AsyncGenerator[str | bytes, None]

    def __init__(
        self,
        content: AsyncGenerator[str | bytes, None],
        *,
        source: Closable,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`source` is what runs behind `content`: closed too, as a body that was never begun
        closes nothing."""
        super().__init__(content, headers=headers, media_type=media_type)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
        async with aclosing(self._source), aclosing(self.body_iterator):
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancelled(sending, watching)
        if sending.cancelled():
            return
        error = sending.exception()
        if isinstance(error, OmniError):
            logger.warning("%s broke off: %s", scope.get("path"), error)
        elif error is not None and not isinstance(error, OSError):
            raise error


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    """Cancel tasks and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def primed(stream: AsyncGenerator[T, None]) -> tuple[T | None, AsyncGenerator[T, None]]:
    """The first item, and the whole stream with it: an early error raises here."""
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        return None, stream
    except BaseException:
        await stream.aclose()
        raise
    return first, _continued(first, stream)


async def _continued(first: T, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(stream):
        yield first
        async for item in stream:
            yield item


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it when the client leaves. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object."""
    body = decode_json(await request.body())
    if not isinstance(body, Mapping):
        raise BadRequestError("the body must be a JSON object")
    return dict(body)


def decode_json(body: bytes) -> object:
    """A body as JSON, when it has no more values than validators can go through at once.

    A validator takes microseconds for each, on the loop that serves everyone.
    """
    if body.count(b",") > _MAX_COMMAS:
        raise _too_many()
    try:
        decoded: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the body is not valid JSON: {exc}") from None
    if isinstance(decoded, dict) and len(decoded) > MAX_FIELDS:
        raise BadRequestError(f"a request has at most {MAX_FIELDS} fields, not {len(decoded)}")
    num_values, stack = 0, [decoded]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            num_values += len(value)
            stack.extend(item for item in value.values() if isinstance(item, dict | list))
        elif isinstance(value, list):
            num_values += len(value)
            if num_values <= MAX_VALUES:
                stack.extend(item for item in value if isinstance(item, dict | list))
        if num_values > MAX_VALUES:
            raise _too_many()
    return decoded


def _too_many() -> BadRequestError:
    return BadRequestError(f"the body has more than {MAX_VALUES} values")
