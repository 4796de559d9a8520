"""vLLM's general plugin: loaded once in the API process, every engine core, every worker and the
process that inspects models. Cheap to import, repeatable, and never the reason that a plain vLLM
does not start.
"""

from __future__ import annotations

import functools
import logging

from vllm_omni.config.registry import ARCHITECTURES
from vllm_omni.errors import ConfigError, VersionError
from vllm_omni.platforms import current_platform
from vllm_omni.version import check_vllm
from vllm_omni.vllm_compat.apply import apply_all

logger = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Prepare this process for our stages. Further calls do nothing."""
    try:
        check_vllm()
    except VersionError as exc:
        # Our own entry points stop with this error. A plain vLLM goes on without us.
        logger.error("vllm-omni is inactive: %s", exc)
        return
    apply_all()
    _prepare_platform()
    _register_architectures()


def _prepare_platform() -> None:
    try:
        platform = current_platform()
    except ConfigError as exc:
        logger.warning("vllm-omni is inactive: %s", exc)
        return
    platform.prepare_process()


def _register_architectures() -> None:
    if not ARCHITECTURES:
        return
    from vllm import ModelRegistry

    for architecture, path in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, path)
