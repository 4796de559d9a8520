"""Overload is told before any work: a request's place is taken before its body is looked into."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.errors import DeadlineExceededError, OmniError

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

logger = logging.getLogger(__name__)
_LINGER_S: Final = 60.0
"""Seconds beyond a request's deadline for its bytes to travel."""
GENERATING: Final = frozenset(
    {
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/messages",
        "/v1/responses",
        "/v1/systemone",
    }
)
"""Routes whose POST runs requests in the stages, ours and vLLM's."""


class AdmissionMiddleware:
    """Refuses what there is no place for: before its body is read, and again once it is there.

    A body may take long to arrive and holds no place meanwhile; parsing and decoding it does. The
    requests that stages run are counted where they start: this bounds those on their way there.
    """

    def __init__(self, app: ASGIApp, omni: AsyncOmni) -> None:
        self._app = app
        self._omni = omni
        self._longest_s = omni.limits.request_timeout_s + _LINGER_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_generating(scope):
            await self._app(scope, receive, send)
            return
        started = _Started(send)
        try:
            async with asyncio.timeout(self._longest_s):
                await self._serve(scope, receive, started)
        except TimeoutError:
            error = DeadlineExceededError(
                f"the client did not send or read all of it within {self._longest_s:g} s"
            )
            if started.has_started:
                logger.warning("%s broke off: %s", scope["path"], error)
                return
            await describe(error).response()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as places:
            try:
                self._omni.check_admission(1)
                body = await read_body(receive)
                if body is None:
                    return
                places.enter_context(self._omni.place())
            except OmniError as exc:
                await describe(exc).response()(scope, receive, send)
                return
            await self._app(scope, replaying(body, receive), send)


class _Started:
    """A `send` that knows whether anything was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        self.has_started = True
        await self._send(message)


def is_generating(scope: Scope) -> bool:
    """Whether this is a request for the stages."""
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and scope["path"].removeprefix(scope.get("root_path", "")) in GENERATING
    )


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None when the client left before it was sent."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Gives out a body that was read, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
