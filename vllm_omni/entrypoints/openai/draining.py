"""A server that is about to stop: what runs may finish, what comes is told to go elsewhere."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.errors import EngineStoppedError

_STILL_OPEN: Final = frozenset({"/metrics"})


class Drain:
    """The HTTP requests that run, and whether more are taken. Lives on the server's loop."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_running = 0
        self.idle = asyncio.Event()
        """Nothing runs."""
        self.idle.set()

    def begin(self) -> None:
        """Refuse what comes from now on."""
        self.is_draining = True

    def enter(self) -> None:
        self.num_running += 1
        self.idle.clear()

    def leave(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self.idle.set()


class DrainMiddleware:
    """Counts requests; while the server drains it answers 503, `/health` included."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if self._drain.is_draining and scope["path"] not in _STILL_OPEN:
            await self._refuse(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1012, "reason": "shutting down"})
            return
        error = describe(EngineStoppedError("the server is shutting down"))
        await error.response()(scope, receive, send)
