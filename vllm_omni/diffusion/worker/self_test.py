"""The small picture with which a replica shows that it works."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.diffusion.request import DiffusionRequest

_LEAST_PIXELS: Final = 64
_DEFAULTS: Final = ("guidance_scale", "true_cfg_scale", "strength", "max_sequence_length", "fps")


def self_test_request(capabilities: Capabilities) -> DiffusionRequest:
    """One or two steps of the smallest size that any model takes."""
    multiple = capabilities.size_multiple
    size = -(-_LEAST_PIXELS // multiple) * multiple
    image = np.full((size, size, 3), 128, np.uint8)
    mask = np.full((size, size), 255, np.uint8)
    fields: dict[str, Any] = {
        "request_id": "self-test",
        "prompt": "a test",
        "seed": 0,
        "num_inference_steps": 2,
        "height": size,
        "width": size,
        "num_frames": 1 + capabilities.frames_multiple if capabilities.max_frames > 1 else 1,
        "images": (image,) * capabilities.min_images,
        "mask": mask if capabilities.needs_mask else None,
    }
    given = {n: capabilities.defaults[n] for n in _DEFAULTS if n in capabilities.defaults}
    return DiffusionRequest(**fields | given | dict(capabilities.self_test))
