"""One picture or video as the diffusion engine and its pipelines see it: every default filled in.

Plain data without torch: made in the API process, sent to the replica, read by the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiffusionRequest:
    """What one picture or video is made from. A client's request for `n` of them has become `n`
    requests before it comes here, number `i` with the seed `seed + i`."""

    request_id: str
    prompt: str
    negative_prompt: str | None = None
    """None: the client gave none."""
    seed: int
    num_inference_steps: int
    height: int | None = None
    """Pixels. None only where the pipeline takes the size from the input image."""
    width: int | None = None
    num_frames: int = 1
    """1 for a still image."""
    fps: int | None = None
    guidance_scale: float | None = None
    """None: the model has no such guidance."""
    true_cfg_scale: float | None = None
    strength: float | None = None
    max_sequence_length: int | None = None
    quality: str | None = None
    """None, `lossless` or `high`; part of the batch key."""
    images: tuple[NDArray[np.uint8], ...] = ()
    """Input images, RGB, [height, width, 3]."""
    mask: NDArray[np.uint8] | None = None
    """[height, width]; 255 where the image is to be repainted, as in diffusers."""
    lora: str | None = None
    """Name of an adapter the replica was started with; the engine applies it before the forward,
    pipelines ignore it."""
    lora_scale: float = 1.0
    upstream: Mapping[str, object] = field(default_factory=dict)
    """What upstream stages made for this item (token ids of a text stage, ...)."""
    extra_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of a generic adapter's pipeline call."""
