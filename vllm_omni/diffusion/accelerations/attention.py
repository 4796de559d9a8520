"""Which attention implementation the denoisers use, of those that diffusers dispatches to."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vllm_omni.diffusion.accelerations import flash_attention
from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)


def set_attention_backend(
    denoisers: Mapping[str, torch.nn.Module], backend: str | None, device: str
) -> None:
    """Use it in every denoiser. None: FlashAttention 3 where the device has it, else the models
    are left as they are.

    Raises:
        ConfigError: there is no such backend here, or a denoiser does not dispatch.
    """
    flash = flash_attention.NAME.value
    if backend in (None, flash) and flash_attention.is_usable(device):
        for name, module in denoisers.items():
            count = flash_attention.use_in(module)
            logger.info("%s: FlashAttention 3 in %d layers", name, count)
            if not count and backend is not None:
                raise ConfigError(f"attention_backend: {name} has no choice of attention backends")
        return
    if backend is None:
        return
    for name, module in denoisers.items():
        if not hasattr(module, "set_attention_backend"):
            raise ConfigError(f"attention_backend: {name} has no choice of attention backends")
        try:
            module.set_attention_backend(backend)  # type: ignore[operator]
        except (ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(f"attention_backend {backend!r}: {error}") from error
    if not denoisers:
        raise ConfigError("attention_backend: the model has no denoiser that takes one")
