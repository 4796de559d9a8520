"""What Stable Diffusion 3 checkpoints can do; imports no torch."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode


def text_to_image(model_dir: Path) -> Capabilities:
    """Stable Diffusion 3 and 3.5."""
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=frozenset({"guidance_scale", "negative_prompt", "max_sequence_length", "lora"}),
        defaults={
            "num_inference_steps": 28,
            "height": 1024,
            "width": 1024,
            "guidance_scale": 7.0,
            "max_sequence_length": 256,
        },
        size_multiple=16,
        has_preview=True,
        loads_lora=True,
    )
