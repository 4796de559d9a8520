"""The weights of one part of a checkpoint, by the names they were released under."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Module = TypeVar("Module", bound=nn.Module)


def part_weights(model_dir: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with `prefix`, without it.

    Raises:
        ConfigError: there are none, or a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for path in _files_with(model_dir, prefix):
        try:
            with safe_open(str(path), framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
                found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"{model_dir} has no weights named {prefix}*")
    return found


def load_part(
    build: Callable[[], Module],
    model_dir: Path,
    prefix: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    random: bool,
) -> Module:
    """Build a module of the reference's and fill it with a checkpoint's weights.

    Args:
        random: keep what the module starts with (`load_format: dummy`).

    Raises:
        ConfigError: weights are missing, or of another shape.
    """
    from transformers.initialization import no_init_weights

    if random:
        module = build()
    else:
        with no_init_weights():
            module = build()
        try:
            module.load_state_dict(part_weights(model_dir, prefix))
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"weights {prefix}* of {model_dir} do not fit: {text}") from error
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _files_with(model_dir: Path, prefix: str) -> list[Path]:
    """The files that hold such weights, as the index says; every file where there is no index."""
    indexes = sorted(model_dir.glob("*.safetensors.index.json"))
    if not indexes:
        return sorted(model_dir.glob("*.safetensors"))
    try:
        names = json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in names.items() if name.startswith(prefix)}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{indexes[0]} is not a weights index: {error!r}") from error
    return [model_dir / file for file in sorted(files)]
