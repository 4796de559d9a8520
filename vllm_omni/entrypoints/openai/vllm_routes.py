"""vLLM's own routes as part of this server: what they would ignore, and how they answer errors.

They run text through the stage that reads prompts and know nothing of audio, of our limits or of
our error codes. Their handlers stay as they are; this stands around them.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.admission import read_body, replaying
from vllm_omni.entrypoints.openai.chat.protocol import OMNI_FIELDS
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.errors import RETRY_AFTER_S, describe, without_paths
from vllm_omni.entrypoints.openai.errors import code_of_status as code_of
from vllm_omni.errors import BadRequestError, OmniError

TEXT_ONLY: Final = frozenset(
    {
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/render",
        "/v1/responses",
        "/v1/responses/render",
    }
)
"""Routes whose answers are text only, and which ignore fields that they do not know."""
ABSENT: Final = frozenset({"/scale_elastic_ep", "/is_scaling_elastic_ep"})
"""Routes of vLLM that nothing here stands behind."""
_SEVERAL: Final = ("messages", "prompt", "items", "questions")
"""Fields that may ask for several answers at once."""


class VllmRoutesMiddleware:
    """Refuses what vLLM's routes would ignore, and gives their errors our codes."""

    def __init__(self, app: ASGIApp, client: OmniEngineClient) -> None:
        self._app = app
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _path(scope) in TEXT_ONLY and scope["method"] == "POST":
            body = await read_body(receive)
            if body is None:
                return
            try:
                self._check(body)
            except OmniError as exc:
                await describe(exc).response()(scope, receive, send)
                return
            receive = replaying(body, receive)
        await self._app(scope, receive, _ErrorShape(send))

    def _check(self, body: bytes) -> None:
        """Raises BadRequestError for what would be ignored or could never be run.

        What is no JSON object is the route's to refuse.
        """
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return
        if not isinstance(fields, dict):
            return
        for name in OMNI_FIELDS:
            if fields.get(name) not in (None, ["text"]):
                raise BadRequestError(f"{name} is served by /v1/chat/completions alone", field=name)
        num, field = num_answers(fields)
        if num > 1:
            self._client.check_places(num, field)


def num_answers(fields: dict[str, Any]) -> tuple[int, str]:
    """How many answers a body asks for, and the field that says so."""
    num, field = 1, "n"
    for name in _SEVERAL:
        value = fields.get(name)
        is_several = isinstance(value, dict) and name == "questions"
        if isinstance(value, list) and value and isinstance(value[0], list | str):
            is_several = True
        if is_several and value is not None and len(value) > num:
            num, field = len(value), name
    each = fields.get("n")
    if isinstance(each, int) and each > 1:
        return num * each, field
    return num, field


class _ErrorShape:
    """A `send` that holds an error answer back until it is whole, and rewrites vLLM's."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json_error(message):
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        start, self._start = self._start, None
        body = _rewritten(b"".join(self._parts), start["status"])
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-length"] = str(len(body))
        if start["status"] == 503:
            headers.setdefault("retry-after", str(RETRY_AFTER_S))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _is_json_error(message: Message) -> bool:
    if message["status"] < 400:
        return False
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in message["headers"]
    )


def _rewritten(body: bytes, status: int) -> bytes:
    """An error in our shape; one that is in it already, or in another API's, keeps its own."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or isinstance(error.get("code"), str):
        return body
    if isinstance(error.get("message"), str):
        error["message"] = without_paths(error["message"])
    if isinstance(error.get("code"), int):
        error["code"] = code_of(status, error.get("param"))
    return json.dumps(answer).encode()


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
