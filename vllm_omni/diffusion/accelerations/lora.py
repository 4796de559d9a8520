"""LoRA adapters, loaded at start by diffusers' loader and switched between forwards.

Adapters change the denoisers only: the text encoders run beside the denoise steps, for other
requests, and must not change under them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.diffusion.models.interface import PipelineComponents
from vllm_omni.errors import ConfigError


class LoraSwitch:
    """The adapters of one pipeline and which of them is on."""

    def __init__(self, components: PipelineComponents, adapters: Mapping[str, str]) -> None:
        """Load every adapter, and switch all off.

        Raises:
            ConfigError: an adapter cannot be loaded, or changes more than the denoisers.
        """
        loader: Any = components.lora_loader
        self._loader = loader
        self._active: tuple[str, float] | None = None
        if not adapters:
            return
        if self._loader is None:
            raise ConfigError("lora_modules: this model takes no LoRA adapters")
        for name, path in adapters.items():
            self._load(name, path, components.denoisers)
        self._loader.disable_lora()

    def __repr__(self) -> str:
        return f"<LoraSwitch {self._active[0] if self._active else 'off'}>"

    def _load(self, name: str, path: str, denoisers: Collection[str]) -> None:
        if not Path(path).exists():
            raise ConfigError(f"lora_modules.{name}: '{path}' does not exist")
        folder, weight_name = (path, None) if Path(path).is_dir() else _split(path)
        try:
            self._loader.load_lora_weights(folder, adapter_name=name, weight_name=weight_name)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"lora_modules.{name}: '{path}' cannot be loaded: {reason}"
            ) from error
        changed = {
            part for part, names in self._loader.get_list_adapters().items() if name in names
        }
        if not changed:
            raise ConfigError(f"lora_modules.{name}: '{path}' changes nothing in this model")
        if more := sorted(changed - set(denoisers)):
            raise ConfigError(
                f"lora_modules.{name}: '{path}' also changes {', '.join(more)}; only adapters of "
                "the denoiser are served"
            )

    def use(self, name: str | None, scale: float) -> None:
        """Have the next forward run with this adapter; None: with none."""
        wanted = (name, scale) if name is not None else None
        if wanted == self._active:
            return
        if wanted is None:
            self._loader.disable_lora()
        else:
            if self._active is None:
                self._loader.enable_lora()
            self._loader.set_adapters([name], [scale])
        self._active = wanted


def _split(path: str) -> tuple[str, str]:
    return str(Path(path).parent), Path(path).name
