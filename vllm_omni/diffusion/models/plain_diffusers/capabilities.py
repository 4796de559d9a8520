"""What a diffusers folder without a family of its own can do; imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.diffusion.models.plain_diffusers.signature import REQUIRED, Signature, signature_of
from vllm_omni.errors import UnsupportedModelError

PARAMS: Final = (
    "negative_prompt",
    "num_frames",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "max_sequence_length",
)
"""Arguments that have a name of their own in a request; others are `extra_args`."""
GIVEN: Final = frozenset({"prompt", "image", "mask_image", "num_inference_steps", *PARAMS})
NEEDS_IMAGE: Final = re.compile("Img2Img|Inpaint|Edit|Image2?To?Video|I2V|Pix2Pix|Upscale|Kontext")
DEFAULT_STEPS: Final = 50
DEFAULT_FPS: Final = 16


def capabilities_of(model_dir: Path) -> Capabilities:
    """Whole requests, one after another; what else, its class says.

    Raises:
        UnsupportedModelError: the class makes no pictures from a prompt, or needs what no request
            brings.
    """
    signature = signature_of(model_dir)
    _check(signature)
    arguments = signature.arguments
    is_video = makes_video(signature)
    defaults: dict[str, object] = {"num_inference_steps": DEFAULT_STEPS}
    for name in ("num_inference_steps", *PARAMS):
        if isinstance(arguments.get(name), int | float):
            defaults[name] = arguments[name]
    params = {name for name in PARAMS if name in arguments} | {"extra_args"}
    if is_video:
        params.add("fps")
        defaults["fps"] = DEFAULT_FPS
    if signature.loads_lora:
        params.add("lora")
    return Capabilities(
        mode=ExecutionMode.REQUEST,
        emits=Modality.VIDEO if is_video else Modality.IMAGE,
        params=frozenset(params),
        defaults=defaults,
        size_multiple=8,
        max_frames=257 if "num_frames" in arguments else 1,
        min_images=int(needs_image(signature)),
        max_images=int("image" in arguments),
        takes_mask="mask_image" in arguments,
        # Where diffusers has the argument, it refuses to be without.
        needs_mask="mask_image" in arguments,
        has_step_progress="callback_on_step_end" in arguments,
        loads_lora=signature.loads_lora,
        # Less would leave it no step to take.
        self_test={"strength": 1.0} if "strength" in arguments else {},
    )


def makes_video(signature: Signature) -> bool:
    return signature.result == "frames"


def needs_image(signature: Signature) -> bool:
    """Some say so only in their name: their argument has a default that they then refuse."""
    if "image" not in signature.arguments:
        return False
    is_required = signature.arguments["image"] is REQUIRED or "mask_image" in signature.arguments
    return is_required or NEEDS_IMAGE.search(signature.name) is not None


def _check(signature: Signature) -> None:
    name = signature.name
    if signature.result not in ("images", "frames"):
        raise UnsupportedModelError(f"{name} makes neither pictures nor videos")
    if "prompt" not in signature.arguments:
        raise UnsupportedModelError(f"{name} takes no prompt")
    required = {name for name, default in signature.arguments.items() if default is REQUIRED}
    missing = sorted(required - GIVEN)
    if missing:
        raise UnsupportedModelError(f"{name} needs {', '.join(missing)}, which no request brings")
