"""What our serving classes share: vLLM's classes with our errors and our admission."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni.entrypoints.openai.errors import AnsweredError, describe, describe_vllm
from vllm_omni.errors import BadRequestError

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
_WRONG_TYPE = (TypeError, AttributeError, LookupError, ValueError, RecursionError)


class OmniErrorsMixin(GenerateBaseServing):  # type: ignore[misc]
    """Errors inside a stream in our shape."""

    def create_streaming_error_response(
        self,
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> str:
        if isinstance(message, Exception):
            return json.dumps(describe(message).body())
        response = self.create_error_response(message, err_type, status_code, param)
        return json.dumps(describe_vllm(response).body())


def answer_of(result: T | ErrorResponse) -> T:
    """The result of one of vLLM's `create_*`; its error answers are raised."""
    if isinstance(result, ErrorResponse):
        raise AnsweredError(describe_vllm(result))
    return result


def parse_model(model: type[M], body: dict[str, Any]) -> M:
    """Validate a body. vLLM's validators may trip over a type that was not checked yet."""
    try:
        return model.model_validate(body)
    except (ValidationError, BadRequestError):
        raise
    except _WRONG_TYPE:
        message = "the request has a field of a wrong type"
        raise BadRequestError(message, field=_wrong_field(model, body)) from None


def _wrong_field(model: type[BaseModel], body: dict[str, Any]) -> str | None:
    """The field that validation trips over, found by trying each alone."""
    for name in model.model_fields.keys() & body.keys():
        try:
            model.model_validate({name: body[name]})
        except (ValidationError, BadRequestError):
            continue
        except _WRONG_TYPE:
            return name
    return None
