"""What Qwen-Image checkpoints can do; imports no torch."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode

_PARAMS = frozenset({"true_cfg_scale", "negative_prompt", "lora"})
_MIN_STEPS = 2
"""The schedule is stretched between its first and last step: it has none for one alone."""


def text_to_image(model_dir: Path) -> Capabilities:
    """Qwen-Image."""
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=_PARAMS | {"max_sequence_length"},
        defaults={
            "num_inference_steps": 50,
            "height": 1024,
            "width": 1024,
            "true_cfg_scale": 4.0,
            "max_sequence_length": 512,
        },
        size_multiple=16,
        min_steps=_MIN_STEPS,
        has_preview=True,
        loads_lora=True,
    )


def edit(model_dir: Path) -> Capabilities:
    """Qwen-Image-Edit: one picture and how to change it."""
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=_PARAMS,
        defaults={
            "num_inference_steps": 50,
            "true_cfg_scale": 4.0,
        },
        size_multiple=16,
        min_steps=_MIN_STEPS,
        min_images=1,
        max_images=1,
        has_preview=True,
        loads_lora=True,
    )
