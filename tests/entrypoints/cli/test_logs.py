"""What vLLM's serving writes of errors that are no surprise."""

from __future__ import annotations

import io
import logging

import pytest
from vllm.entrypoints.anthropic import api_router
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.cli.logs import ToldErrors
from vllm_omni.errors import EngineStoppedError


@pytest.mark.parametrize(
    ("name", "error", "is_told"),
    [
        ("vllm.entrypoints.openai.serving", EngineStoppedError("100 % stopped"), True),
        ("vllm.entrypoints.openai.serving", RuntimeError("a surprise"), False),
        ("vllm.v1.engine", EngineStoppedError("stopped"), False),
        (api_router.logger.name, VLLMValidationError("the prompt is too long"), True),
        (api_router.logger.name, ValueError("no such role"), True),
        (api_router.logger.name, RuntimeError("a surprise"), False),
        ("vllm.entrypoints.openai.serving", ValueError("a surprise in a stream"), False),
    ],
)
def test_only_errors_that_clients_were_told_lose_their_traceback(
    name: str, error: Exception, is_told: bool
) -> None:
    written = io.StringIO()
    logger = logging.Logger(name)
    handler = logging.StreamHandler(written)
    handler.addFilter(ToldErrors())
    logger.addHandler(handler)

    try:
        raise error
    except Exception:
        logger.exception("Error in stream %d.", 3)

    first, *rest = written.getvalue().splitlines()
    assert first.startswith("Error in stream 3.")
    assert str(error) in (rest or [first])[-1]
    assert bool(rest) != is_told
