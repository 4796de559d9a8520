"""From a prompt and params to a request with every default filled in, or the reason why not.

Runs in the API process before anything is admitted; it loads neither torch nor weights.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams, check_prompt
from vllm_omni.inputs.prompt import OmniPrompt

UPSTREAM: Final = "upstream"
"""Key of `OmniPrompt.extra` under which a bridge puts what upstream stages made."""

NEEDS_MASK: Final = "this model paints a part of a picture anew: it needs a mask"
_OPTIONAL: Final = (
    "negative_prompt",
    "num_frames",
    "fps",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "max_sequence_length",
    "lora",
    "extra_args",
)
"""Params that not every model has; `Capabilities.params` names those it has."""
_FILLED: Final = (
    "num_inference_steps",
    "height",
    "width",
    "negative_prompt",
    "num_frames",
    "fps",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "max_sequence_length",
    "quality",
    "lora",
)
_MAX_SEED: Final = 2**32


def load_capabilities(name: str | None, model_dir: Path, stage: str) -> Capabilities:
    """What the pipeline of a folder can do, by `module:function`.

    Raises:
        ConfigError: there is no such function, or the folder is not one of its models.
    """
    module, _, function = (name or "").partition(":")
    try:
        capabilities: Capabilities = getattr(importlib.import_module(module), function)(model_dir)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ConfigError(
            f"stage {stage!r}: capabilities of '{model_dir}' ({name}): {error}"
        ) from error
    return capabilities


def make_request(
    request_id: str,
    prompt: OmniPrompt,
    params: OmniDiffusionSamplingParams,
    capabilities: Capabilities,
) -> DiffusionRequest:
    """Everything one picture or video is made from.

    Raises:
        BadRequestError: names the field that this model does not take so.
    """
    _check_params(params, capabilities)
    _check_media(prompt, capabilities)
    if prompt.text is None:
        raise BadRequestError("there is no prompt", field="prompt")
    check_prompt("prompt", prompt.text)
    values = _filled(params, capabilities)
    _check_size(values, capabilities)
    _check_frames(values, capabilities)
    upstream = prompt.extra.get(UPSTREAM, {})
    assert isinstance(upstream, Mapping), "a bridge gives a mapping"
    return DiffusionRequest(
        request_id=request_id,
        prompt=prompt.text,
        seed=params.seed if params.seed is not None else secrets.randbelow(_MAX_SEED),
        images=tuple(image.pixels for image in prompt.images),
        mask=prompt.mask.pixels if prompt.mask is not None else None,
        lora_scale=params.lora_scale if params.lora_scale is not None else 1.0,
        upstream=upstream,
        extra_args=params.extra_args,
        **values,
    )


def _check_params(params: OmniDiffusionSamplingParams, capabilities: Capabilities) -> None:
    for name in _OPTIONAL:
        known = name in capabilities.params or (name == "lora" and capabilities.loads_lora)
        if getattr(params, name) not in (None, {}) and not known:
            raise BadRequestError(f"this model has no {name}", field=name)
    if params.preview_interval is not None and not capabilities.has_preview:
        raise BadRequestError("this model has no previews", field="preview_interval")
    if params.num_outputs_per_prompt != 1:
        raise BadRequestError("one request is one output here", field="n")
    steps = params.num_inference_steps
    least, most = capabilities.min_steps, capabilities.max_steps
    if steps is not None and not least <= steps <= most:
        raise BadRequestError(
            f"this model takes {least} to {most} num_inference_steps, got {steps}",
            field="num_inference_steps",
        )


def _check_media(prompt: OmniPrompt, capabilities: Capabilities) -> None:
    num_images, least, most = len(prompt.images), capabilities.min_images, capabilities.max_images
    if not most and num_images:
        raise BadRequestError("this model reads no image", field="image")
    if not least <= num_images <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise BadRequestError(f"this model reads {wanted} images, got {num_images}", field="image")
    if prompt.mask is None:
        if capabilities.needs_mask:
            raise BadRequestError(NEEDS_MASK, field="mask")
        return
    if not capabilities.takes_mask:
        raise BadRequestError("this model takes no mask", field="mask")
    if not prompt.images:
        raise BadRequestError("a mask needs an image", field="mask")
    if prompt.mask.size != prompt.images[0].size:
        mask, image = prompt.mask.size, prompt.images[0].size
        raise BadRequestError(
            f"the mask has {mask[0]}x{mask[1]} pixels, its image {image[0]}x{image[1]}",
            field="mask",
        )


def _filled(params: OmniDiffusionSamplingParams, capabilities: Capabilities) -> dict[str, Any]:
    """The params that a request has, with the model's defaults where the client gave none."""
    values: dict[str, Any] = {}
    for name in _FILLED:
        value = getattr(params, name)
        values[name] = value if value is not None else capabilities.defaults.get(name)
    if (params.height is None) != (params.width is None):
        missing = "height" if params.height is None else "width"
        raise BadRequestError("height and width are given together", field=missing)
    values["num_frames"] = values["num_frames"] or 1
    return values


def _check_size(values: Mapping[str, Any], capabilities: Capabilities) -> None:
    height, width = values["height"], values["width"]
    if height is None or width is None:
        return  # the pipeline takes it from the image
    for name in ("height", "width"):
        if values[name] % capabilities.size_multiple:
            raise BadRequestError(
                f"{name} must be a multiple of {capabilities.size_multiple}, got {values[name]}",
                field=name,
            )
    if height * width > capabilities.max_pixels:
        raise BadRequestError(
            f"{width}x{height} are {height * width} pixels; at most {capabilities.max_pixels} "
            "are made",
            field="height" if height >= width else "width",
        )


def _check_frames(values: Mapping[str, Any], capabilities: Capabilities) -> None:
    num_frames = values["num_frames"]
    if num_frames > capabilities.max_frames:
        raise BadRequestError(
            f"num_frames must be at most {capabilities.max_frames}, got {num_frames}",
            field="num_frames",
        )
    if (num_frames - 1) % capabilities.frames_multiple:
        raise BadRequestError(
            f"num_frames must be 1 more than a multiple of {capabilities.frames_multiple}, "
            f"got {num_frames}",
            field="num_frames",
        )
    if capabilities.emits is Modality.VIDEO and not values["fps"]:
        raise BadRequestError("fps is missing", field="fps")
