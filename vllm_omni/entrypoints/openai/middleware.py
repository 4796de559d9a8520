"""What every HTTP request passes first: the key, and the bound on its body."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni.entrypoints.openai.errors import HttpError, describe
from vllm_omni.entrypoints.openai.input_memory import InputMemory
from vllm_omni.errors import OmniError

OPEN_PATHS: Final = frozenset(
    {"/health", "/ping", "/metrics", "/version", "/load", "/docs", "/redoc", "/openapi.json"}
)
"""Served without a key: they read state and do no work. Everything else needs one."""


class KeyMiddleware(AuthenticationMiddleware):  # type: ignore[misc]
    """vLLM's check of the API key, on every path that is not listed as open."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        if path in OPEN_PATHS or self.verify_token(Headers(scope=scope)):
            return self.app(scope, receive, send)
        error = HttpError(
            HTTPStatus.UNAUTHORIZED,
            "the API key is missing or wrong",
            "AuthenticationError",
            "invalid_api_key",
        )
        return error.response()(scope, receive, send)


class _RefusedError(Exception):
    """The body passed a bound while it was read."""


class BodyLimitMiddleware:
    """Refuses a body over the bound: at once by its header, else as soon as it is passed.

    What is read counts against the memory that all requests share, until the request is over.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, memory: InputMemory) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0
        has_started = False
        refusal: HttpError | None = None

        async def bounded_receive() -> Message:
            nonlocal num_bytes, refusal
            message = await receive()
            num_body_bytes = len(message.get("body", b""))
            num_bytes += num_body_bytes
            if num_bytes > self._max_bytes:
                refusal = self._too_large()
                raise _RefusedError
            try:
                share.add(num_body_bytes)
            except OmniError as error:
                refusal = describe(error)
                raise _RefusedError from None
            return message

        async def bounded_send(message: Message) -> None:
            # What a handler makes of the broken-off body is not what the client should read.
            nonlocal has_started
            if refusal is None:
                has_started = True
                await send(message)

        with self._memory.share() as share, contextlib.suppress(_RefusedError):
            await self._app(scope, bounded_receive, bounded_send)
        if refusal is not None and not has_started:
            await refusal.response()(scope, receive, send)

    def _too_large(self) -> HttpError:
        return HttpError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request's body is larger than {self._max_bytes} bytes",
            "BadRequestError",
            "request_too_large",
        )
