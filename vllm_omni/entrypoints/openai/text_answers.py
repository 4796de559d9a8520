"""What chat and text completions answer with: one JSON object, or events."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.request_scope import EventStream
from vllm_omni.entrypoints.openai.responses import (
    JsonAnswer,
    StreamedResponse,
    read_json,
    until_disconnect,
)

JSON_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
"""How a route describes a body that it reads by itself."""


async def answer_text(
    raw_request: Request,
    create: Callable[[dict[str, Any], Request], Coroutine[Any, Any, BaseModel | EventStream]],
) -> Response:
    """Read the body, let a serving class make the answer, and frame it."""
    body = await read_json(raw_request)
    answer = await until_disconnect(raw_request, create(body, raw_request))
    if not isinstance(answer, EventStream):
        return JsonAnswer(answer.model_dump())
    interval = float(raw_request.app.state.args.sse_keep_alive_interval)
    return StreamedResponse(
        with_sse_keep_alive(answer.events, interval),
        source=answer.scope,
        media_type="text/event-stream",
    )
