"""What GLM-Image checkpoints can do; imports no torch."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode


def text_to_image(model_dir: Path) -> Capabilities:
    """Text to image. A negative prompt is no input of this model: guidance is against nothing."""
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=frozenset({"guidance_scale", "max_sequence_length"}),
        defaults={
            "num_inference_steps": 50,
            "height": 1024,
            "width": 1024,
            "guidance_scale": 1.5,
            "max_sequence_length": 2048,
        },
        # A token of the autoregressive model is 32 pixels wide.
        size_multiple=32,
        has_preview=True,
    )
