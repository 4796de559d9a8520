"""Regional compilation: the denoiser's repeated blocks, each kind compiled once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)


def compile_blocks(
    denoisers: Mapping[str, torch.nn.Module], *, enforce_eager: bool | None, by_default: bool
) -> bool:
    """Have the blocks compiled when they first run; whether any will be.

    Raises:
        ConfigError: it was asked for, and a denoiser names no repeated blocks.
    """
    if enforce_eager or (enforce_eager is None and not by_default):
        return False
    able = {name: module for name, module in denoisers.items() if _repeated_blocks(module)}
    if enforce_eager is False and len(able) < max(1, len(denoisers)):
        missing = ", ".join(sorted(denoisers.keys() - able.keys())) or "the model"
        raise ConfigError(f"enforce_eager: false: {missing} has no repeated blocks to compile")
    for name, module in able.items():
        module.compile_repeated_blocks()  # type: ignore[operator]
        logger.info("%s: %s will be compiled", name, ", ".join(_repeated_blocks(module)))
    return bool(able)


def _repeated_blocks(module: torch.nn.Module) -> list[str]:
    blocks: list[str] = list(getattr(module, "_repeated_blocks", None) or ())
    names = {type(part).__name__ for part in module.modules()}
    return [block for block in blocks if block in names]
