"""Our log lines go where vLLM's go, in its form."""

from __future__ import annotations

import logging

from vllm_omni import envs


def share_vllm_logging() -> None:
    """Give this package's logger vLLM's handlers. Call when vLLM has configured its own."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_omni")
    ours.handlers = list(theirs.handlers)
    ours.propagate = not ours.handlers
    level = envs.log_level()
    ours.setLevel(theirs.level or logging.INFO if level is None else level)
