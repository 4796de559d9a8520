"""How the VAE decodes: at once, in tiles, in slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from vllm_omni.errors import ConfigError


class VaeMode:
    """Tiling and slicing of one VAE."""

    def __init__(
        self,
        vae: torch.nn.Module | None,
        tiling: Literal["auto", "on", "off"] = "auto",
        slicing: Literal["on", "off"] = "off",
    ) -> None:
        """Raises ConfigError for what the VAE cannot do."""
        self._vae = vae
        if tiling == "on":
            self._call("vae_tiling", "enable_tiling")
        if slicing == "on":
            self._call("vae_slicing", "enable_slicing")
        self._may_tile = tiling == "auto" and hasattr(vae, "enable_tiling")

    def _call(self, option: str, method: str) -> None:
        try:
            getattr(self._vae, method)()
        except (AttributeError, NotImplementedError) as error:
            raise ConfigError(f"{option}: the model's VAE cannot do that") from error

    @contextlib.contextmanager
    def tiled(self) -> Iterator[None]:
        """Decode in tiles meanwhile, where that is left open and the VAE can."""
        if not self._may_tile:
            yield
            return
        self._call("vae_tiling", "enable_tiling")
        try:
            yield
        finally:
            self._call("vae_tiling", "disable_tiling")
