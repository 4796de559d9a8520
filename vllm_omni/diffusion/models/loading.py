"""Loads a diffusers folder into the reference's own pipeline object, which holds the modules."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from vllm_omni.diffusion.models.interface import PipelineContext
from vllm_omni.errors import ConfigError

INDEX_NAME: Final = "model_index.json"
DUMMY: Final = "dummy"
DENOISERS: Final = ("transformer", "transformer_2", "unet")
"""Components that take the denoise steps."""


def read_index(model_dir: Path) -> dict[str, Any]:
    """The folder's `model_index.json`.

    Raises:
        ConfigError: it is not there, or not a JSON object.
    """
    path = model_dir / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(index, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return index


def load_reference(
    context: PipelineContext,
    class_name: str | None = None,
    component_dtypes: Mapping[str, torch.dtype] | None = None,
    unused: Collection[str] = (),
) -> Any:
    """The reference pipeline with its modules on the device, ready for inference.

    `class_name` names a class of diffusers; None: the one that the folder names.
    `component_dtypes` are exceptions to the context's dtype; `unused` components are not loaded.

    Raises:
        ConfigError: the folder is no complete checkpoint of that class.
    """
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    wanted = class_name or read_index(context.model_dir).get("_class_name")
    pipeline_class = getattr(diffusers, str(wanted), None)
    if pipeline_class is None:
        raise ConfigError(f"diffusers has no pipeline class {wanted!r}")
    dtypes: dict[str, torch.dtype] = {"default": context.dtype, **(component_dtypes or {})}
    if context.load_format == DUMMY:
        pipeline = _random_pipeline(pipeline_class, context, dtypes, unused)
    else:
        try:
            pipeline = pipeline_class.from_pretrained(
                context.model_dir, dtype=dtypes, local_files_only=True, **dict.fromkeys(unused)
            ).to("cpu" if context.weights_on_host else context.device)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()
            raise ConfigError(
                f"'{context.model_dir}' cannot be loaded as {wanted}: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error
    pipeline.set_progress_bar_config(disable=True)
    for module in modules_of(pipeline).values():
        module.eval().requires_grad_(False)
    return pipeline


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The networks of a reference pipeline by component name."""
    return {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }


def _random_pipeline(
    pipeline_class: Any,
    context: PipelineContext,
    dtypes: Mapping[str, torch.dtype],
    unused: Collection[str],
) -> Any:
    """The pipeline at its configured sizes with random weights, made on the device."""
    parts: dict[str, Any] = {}
    for name, entry in read_index(context.model_dir).items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list):
            parts[name] = entry
            continue
        library, part_class = entry
        folder = context.model_dir / name
        if library is None or name in unused:
            parts[name] = None
        else:
            module = importlib.import_module(_module_name(library))
            dtype = dtypes.get(name, dtypes["default"])
            device = "cpu" if context.weights_on_host else context.device
            parts[name] = _random_part(getattr(module, part_class), folder, device, dtype)
    return pipeline_class(**parts)


def _module_name(library: str) -> str:
    return library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"


def _random_part(part_class: Any, folder: Path, device: str, dtype: torch.dtype) -> Any:
    from transformers import PreTrainedModel

    if not issubclass(part_class, torch.nn.Module):
        return part_class.from_pretrained(folder)
    # Made in float32, since some constants that are computed here exist in no smaller type.
    with torch.device(device):
        if issubclass(part_class, PreTrainedModel):
            part = part_class(part_class.config_class.from_pretrained(folder))
        else:
            part = part_class.from_config(part_class.load_config(folder))
    return part.to(device=device, dtype=dtype)
