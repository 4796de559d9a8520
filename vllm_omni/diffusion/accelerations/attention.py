"""Which attention implementation the denoisers use, of those that diffusers dispatches to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_omni.errors import ConfigError


def set_attention_backend(denoisers: Mapping[str, torch.nn.Module], backend: str | None) -> None:
    """Use it in every denoiser; None leaves the models as they are.

    Raises:
        ConfigError: there is no such backend here, or a denoiser does not dispatch.
    """
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
