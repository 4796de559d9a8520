"""Every error as an HTTP answer in OpenAI's shape: `{"error": {message, type, param, code}}`.

One function (`describe`) maps an exception, ours or foreign, to its answer; the handlers, the
streams and the routers all use it. `code` is always a name, never a number.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import fastapi
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.errors import OmniError, StageUnavailableError

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
_CODES: Final = {
    HTTPStatus.BAD_REQUEST: "invalid_request",
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_media_type",
    HTTPStatus.UNPROCESSABLE_ENTITY: "invalid_request",
    HTTPStatus.NOT_IMPLEMENTED: "not_implemented",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}
_VALIDATION_FRAMES: Final = frozenset({"request_body_to_args", "request_params_to_args"})
_PLACES: Final = ("body", "query", "path")
"""Where FastAPI found a field; a client knows it by its name alone."""
_MAX_MESSAGE_CHARS: Final = 500
_CLIENT_CLOSED_REQUEST: Final = 499
_SERVER_PATH: Final = re.compile(r"(?<![\w/:.~-])/(?!v\d/)(?:[\w.+@-]+/)+([\w.+@-]*)")
"""An absolute path of two parts or more; neither a URL nor one of the API's own."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """What a client is told of an error."""

    status: HTTPStatus
    message: str
    type: str
    code: str
    param: str | None = None
    is_retryable: bool = False

    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.is_retryable else None
        return JSONResponse(self.body(), self.status, headers)

    def event(self) -> str:
        """The error as a server-sent event, for a stream whose headers are gone."""
        return f"data: {json.dumps(self.body())}\n\n"


class AnsweredError(Exception):
    """An error whose answer is decided already (by vLLM)."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def describe(exc: BaseException) -> HttpError:
    """The answer for an exception. What is not the client's fault and not known is a bare 500."""
    if isinstance(exc, AnsweredError):
        return exc.error
    if isinstance(exc, OmniError):
        named = f" ({exc.stage})" if isinstance(exc, StageUnavailableError) and exc.stage else ""
        return HttpError(
            exc.status, f"{exc}{named}", type(exc).__name__, exc.code, exc.field, exc.retryable
        )
    if isinstance(exc, RequestValidationError | ValidationError):
        return _describe_validation(exc)
    if isinstance(exc, HTTPException):
        status = HTTPStatus(exc.status_code)
        if status is HTTPStatus.UNPROCESSABLE_ENTITY:
            status = HTTPStatus.BAD_REQUEST
        return HttpError(status, str(exc.detail), status.phrase, _code_of(status))
    if isinstance(exc, EngineDeadError):
        return describe(StageUnavailableError("the stage that does this has no live replica"))
    if _failed_in_validation(exc):
        message = "the request has a field of a wrong type"
        return HttpError(HTTPStatus.BAD_REQUEST, message, "BadRequestError", "invalid_request")
    if isinstance(exc, VLLMError | ValueError | TypeError | OverflowError | NotImplementedError):
        return describe_vllm(create_error_response(exc))
    return HttpError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the server failed to handle this request",
        "InternalServerError",
        "internal_error",
    )


def describe_vllm(response: ErrorResponse) -> HttpError:
    """vLLM's own error answers, whose code is the status."""
    error = response.error
    status = HTTPStatus(error.code)
    return HttpError(
        status,
        without_paths(error.message),
        error.type,
        code_of_status(status, error.param),
        error.param,
        status is HTTPStatus.SERVICE_UNAVAILABLE,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Replace vLLM's handlers, so that every route answers in the same shape."""

    async def handle(request: Request, exc: Exception) -> JSONResponse:
        error = describe(exc)
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not error.is_retryable:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
        return error.response()

    kinds: tuple[type[Exception], ...] = (
        OmniError,
        AnsweredError,
        RequestValidationError,
        ValidationError,
        HTTPException,
        fastapi.HTTPException,
        VLLMError,
        ValueError,
        TypeError,
        OverflowError,
        NotImplementedError,
        # Raised by validators that trust a field's type before it was checked.
        AttributeError,
        LookupError,
        RecursionError,
        Exception,
    )
    for kind in kinds:
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientDisconnect, _nobody_listens)


async def _nobody_listens(request: Request, exc: Exception) -> Response:
    """The client left; the status is for the access log only."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def code_of_status(status: int, param: str | None = None) -> str:
    """The name for what vLLM answers by number."""
    if status == HTTPStatus.NOT_FOUND and param == "model":
        return "model_not_found"
    return _code_of(HTTPStatus(status))


def without_paths(message: str) -> str:
    """A message of vLLM's without the folders of this machine: a file keeps its name."""
    return _SERVER_PATH.sub(r"\1", message)


def _code_of(status: HTTPStatus) -> str:
    if status in _CODES:
        return _CODES[status]
    return "internal_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request"


def _describe_validation(exc: RequestValidationError | ValidationError) -> HttpError:
    """The first error that pydantic found: where and what, without the value."""
    errors = exc.errors()
    first: dict[str, Any] = {"msg": "the request is malformed", "loc": ()}
    if errors:  # vLLM's own checks put a bare text there
        first |= errors[0] if isinstance(errors[0], Mapping) else {"msg": errors[0]}
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, OmniError):
        return describe(cause)
    if isinstance(cause, VLLMValidationError):
        return describe_vllm(create_error_response(cause))
    where = _PLACES if isinstance(exc, RequestValidationError) else ("body",)
    loc = tuple(
        part.removesuffix("[]") if isinstance(part, str) else part  # a form's way to say list
        for i, part in enumerate(first["loc"])
        if i or part not in where
    )
    param = field_path(clean_loc_for_param(loc)) if loc else None
    message = str(first["msg"])[:_MAX_MESSAGE_CHARS]
    if param:
        message = f"{param}: {message}"
    return HttpError(HTTPStatus.BAD_REQUEST, message, "BadRequestError", "invalid_request", param)


def field_path(dotted: str) -> str:
    """`messages.0.content` as a client writes it: `messages[0].content`."""
    path = ""
    for part in dotted.split("."):
        path += f"[{part}]" if part.isdecimal() else f".{part}" if path else part
    return path


def _failed_in_validation(exc: BaseException) -> bool:
    """Whether a validator of the request's model tripped over a value it did not expect."""
    frame = exc.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name in _VALIDATION_FRAMES:
            return True
        frame = frame.tb_next
    return False
