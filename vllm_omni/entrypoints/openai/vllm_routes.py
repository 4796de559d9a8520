"""vLLM's own routes as part of this server: what they would ignore, and how they answer errors.

They run text through the stage that reads prompts and know nothing of audio, of our limits or of
our error codes. Their handlers stay as they are; this stands around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.admission import read_body, replaying
from vllm_omni.entrypoints.openai.chat.protocol import OMNI_FIELDS
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.errors import (
    RETRY_AFTER_S,
    AnsweredError,
    code_of_status,
    describe,
    without_paths,
)
from vllm_omni.entrypoints.openai.models.serving import OmniModels
from vllm_omni.entrypoints.openai.responses import decode_json
from vllm_omni.entrypoints.openai.transcriptions.protocol import FORM_FIELDS
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
_CHECKS_ITSELF: Final = frozenset(
    {"/v1/audio/speech", "/v1/audio/transcriptions", "/v1/chat/completions"}
)
"""Routes of ours that read their bodies by the same rules."""
_INVOCATIONS: Final = "/invocations"
_MODEL_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"
"""Stands in the place of a body's `model` on that route, also when there is no such header."""
_ORDINARY_WORDS: Final = frozenset(
    {"audio", "input", "messages", "model", "prompt", "store", "stream", "text", "user"}
)
"""Names of fields that messages use as words."""
_OLD_NAME: Final = "max_tokens"
_NEW_NAME: Final = "max_completion_tokens"
"""vLLM names the first where a request has the second."""
_PROMPT_NAMES: Final = frozenset({"input_text", "input_tokens"})
"""What vLLM names where a prompt is too long, whatever the request calls it."""
_PROMPT_FIELDS: Final = {
    "/v1/chat/completions/batch": "messages",
    "/v1/chat/completions/render": "messages",
    "/v1/responses": "input",
    "/v1/responses/render": "input",
}
"""By route; `prompt` on all others."""
_MAX_LOOKED_AT: Final = 16_384
"""Bytes of a body in which a field is looked for that an error names without saying so."""
MAX_TEXT_CHARS: Final = 4 * 1024 * 1024
"""Of a prompt or of all messages; more than any model reads."""
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
        path = _path(scope)
        if scope["method"] == "POST" and path not in _CHECKS_ITSELF and _is_json(scope):
            body = await read_body(receive)
            if body is None:
                return
            try:
                self._check(body, is_text_only=path in TEXT_ONLY)
                if path == _INVOCATIONS:
                    scope = _with_model_as_header(scope, body)
            except (OmniError, AnsweredError) as exc:
                await describe(exc).response()(scope, receive, send)
                return
            receive = replaying(body, receive)
        kept = _Kept(receive, is_form=not _is_json(scope))
        await self._app(scope, kept, _ErrorShape(send, kept, path))

    def _check(self, body: bytes, *, is_text_only: bool) -> None:
        """Raises BadRequestError for what would block, be ignored or could never be run."""
        if not body:
            return
        fields = decode_json(body)
        if not isinstance(fields, dict):
            if is_text_only:
                raise BadRequestError("the body must be a JSON object")
            return
        _check_text(fields)
        if not is_text_only:
            return
        for name in OMNI_FIELDS:
            if fields.get(name) not in (None, ["text"]):
                raise BadRequestError(f"{name} is served by /v1/chat/completions alone", field=name)
        num, field = num_answers(fields)
        if num > 1:
            self._client.check_places(num, field)


def _with_model_as_header(scope: Scope, body: bytes) -> Scope:
    """The request with its body's model where this route reads it.

    Raises:
        AnsweredError: a name that fits no header is not the model's.
    """
    fields = decode_json(body) if body else None
    name = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(name, str) or not name or _MODEL_HEADER in Headers(scope=scope):
        return scope
    try:
        value = name.encode("latin-1")
    except UnicodeEncodeError:
        models: OmniModels = scope["app"].state.omni_models
        models.check_name(name)
        return scope
    return {**scope, "headers": [*scope["headers"], (_MODEL_HEADER.encode(), value)]}


def _check_text(fields: Mapping[str, Any]) -> None:
    """Refuse a text that would be tokenized for minutes, on a route that has no other bound."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and len(prompt) > MAX_TEXT_CHARS:
        raise BadRequestError(
            f"prompt has {len(prompt)} characters, at most {MAX_TEXT_CHARS} are read",
            field="prompt",
        )
    if (num := _num_text_chars(fields.get("messages"))) > MAX_TEXT_CHARS:
        raise BadRequestError(
            f"messages have {num} characters of text, at most {MAX_TEXT_CHARS} are read",
            field="messages",
        )


def _num_text_chars(messages: object) -> int:
    """Characters of the texts of messages, not of their media."""
    if not isinstance(messages, list):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [*contents, *(part.get("text") for part in parts if isinstance(part, dict)), *parts]
    return sum(len(text) for text in texts if isinstance(text, str))


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


class _Kept:
    """A `receive` that remembers the body, if it came in one piece."""

    def __init__(self, receive: Receive, *, is_form: bool) -> None:
        self._receive = receive
        self._is_form = is_form
        self._body = b""

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body = b"" if message.get("more_body", False) else message.get("body", b"")
        return message

    def fields(self) -> Collection[str]:
        """Names of the request's fields, of a body that is quickly looked through."""
        if self._is_form:
            return FORM_FIELDS
        if len(self._body) > _MAX_LOOKED_AT:
            return ()
        try:
            return msgspec.json.decode(self._body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ()


class _ErrorShape:
    """A `send` that holds an error answer back until it is whole, and completes vLLM's."""

    def __init__(self, send: Send, kept: _Kept, path: str) -> None:
        self._send = send
        self._kept = kept
        self._path = path
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
        body = self._completed(b"".join(self._parts), start["status"])
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-length"] = str(len(body))
        if start["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.setdefault("retry-after", str(RETRY_AFTER_S))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _completed(self, body: bytes, status: int) -> bytes:
        """An error in our shape. One of another API keeps its own, but for the server's paths."""
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            return body
        if not isinstance(error.get("code"), str):
            error["message"] = without_paths(error["message"])
        if isinstance(error.get("code"), int):
            error["code"] = code_of_status(status, error.get("param"))
        if "param" in error and error["param"] is None and status == HTTPStatus.BAD_REQUEST:
            error["param"] = named_in(error["message"], self._kept.fields())
        if error.get("param") in _PROMPT_NAMES:
            error["param"] = _PROMPT_FIELDS.get(self._path, "prompt")
        if error.get("param") == _OLD_NAME and _OLD_NAME not in (fields := self._kept.fields()):
            error["param"] = _NEW_NAME if _NEW_NAME in fields else _OLD_NAME
        return json.dumps(answer).encode()


def _is_json_error(message: Message) -> bool:
    if message["status"] < HTTPStatus.BAD_REQUEST:
        return False
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in message["headers"]
    )


def named_in(message: str, fields: Iterable[str]) -> str | None:
    """The field that a message names first, as it is written or with spaces."""
    found: list[tuple[int, int, str]] = []
    for name in set(fields) - _ORDINARY_WORDS:
        pattern = rf"(?<!\w){re.escape(name).replace('_', '[_ ]')}(?!\w)"
        if match := re.search(pattern, message, re.IGNORECASE):
            found.append((match.start(), -len(name), name))
    return min(found)[2] if found else None


def _is_json(scope: Scope) -> bool:
    kind = Headers(scope=scope).get("content-type", "application/json")
    return kind.partition(";")[0].strip().lower() == "application/json"


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
