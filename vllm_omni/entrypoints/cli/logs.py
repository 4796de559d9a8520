"""Our log lines go where vLLM's go, in its form."""

from __future__ import annotations

import logging

from vllm.exceptions import VLLMClientError

from vllm_omni import envs
from vllm_omni.errors import OmniError

_ANSWERS_ERRORS = "vllm.entrypoints.anthropic.api_router"
"""Its routes answer what the client did wrong themselves, and write all of it down."""


class ToldErrors(logging.Filter):
    """An error that vLLM's serving told its client is one line, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if _is_told(record.name, error):
            text = record.getMessage()
            if str(error) not in text:
                text = f"{text} {type(error).__name__}: {error}"
            record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
        return True


def _is_told(name: str, error: BaseException | None) -> bool:
    """Whether this error is no surprise: ours, or what these routes call the client's fault."""
    if not name.startswith("vllm.entrypoints."):
        return False
    client = (VLLMClientError, ValueError, TypeError) if name == _ANSWERS_ERRORS else ()
    return isinstance(error, (OmniError, *client))


def share_vllm_logging() -> None:
    """Give this package's logger vLLM's handlers. Call when vLLM has configured its own."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_omni")
    for handler in theirs.handlers:
        if not any(isinstance(known, ToldErrors) for known in handler.filters):
            handler.addFilter(ToldErrors())
    ours.handlers = list(theirs.handlers)
    ours.propagate = not ours.handlers
    level = envs.log_level()
    ours.setLevel(theirs.level or logging.INFO if level is None else level)
