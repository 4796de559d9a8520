"""What Z-Image checkpoints can do; imports no torch."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode


def text_to_image(model_dir: Path) -> Capabilities:
    """Z-Image; Z-Image-Turbo wants `guidance_scale` 0 and 9 steps."""
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=frozenset({"guidance_scale", "negative_prompt", "max_sequence_length", "lora"}),
        defaults={
            "num_inference_steps": 50,
            "height": 1024,
            "width": 1024,
            "guidance_scale": 5.0,
            "max_sequence_length": 512,
        },
        size_multiple=16,
        has_preview=True,
        loads_lora=True,
    )
