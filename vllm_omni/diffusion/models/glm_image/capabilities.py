"""What GLM-Image checkpoints can do; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_omni.diffusion.models.glm_image.bridges import TOKENS
from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode

_GRIDS: Final = Grids.of_size(64, 64)
_SELF_TEST: Final = {
    "height": 64,
    "width": 64,
    "upstream": {TOKENS: (0,) * (_GRIDS.num_small + _GRIDS.num_large)},
}


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
        max_pixels=2048 * 2048,
        has_preview=True,
        self_test=_SELF_TEST,
    )
