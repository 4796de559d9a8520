"""Our log lines go where vLLM's go, in its form."""

from __future__ import annotations

import logging

from vllm_omni import envs
from vllm_omni.errors import OmniError


class ToldErrors(logging.Filter):
    """An error of ours that vLLM's serving caught went to its client: one line, no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OmniError) and record.name.startswith("vllm.entrypoints."):
            text = f"{record.getMessage()} {type(error).__name__}: {error}"
            record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
        return True


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
