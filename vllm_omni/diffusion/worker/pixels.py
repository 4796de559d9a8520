"""From what a pipeline decoded to pixels that may leave the replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class NonFiniteLatentsError(RuntimeError):
    """The latents hold NaN or infinity; the request fails instead of showing noise or black."""


def check_finite(latents: torch.Tensor) -> None:
    """Raise for latents that are no numbers. NaN stays NaN, so one look at the end finds it."""
    import torch

    if not bool(torch.isfinite(latents).all()):
        raise NonFiniteLatentsError("the model's latents hold NaN or infinite numbers")


def checked_pixels(pixels: object) -> NDArray[np.uint8]:
    """8 bit RGB, [height, width, 3] or [frames, height, width, 3], contiguous.

    Raises:
        RuntimeError: the pipeline made something else.
    """
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim not in (3, 4)
        or pixels.shape[-1] != 3
        or not pixels.size
    ):
        what = getattr(pixels, "shape", type(pixels).__name__)
        raise RuntimeError(f"the pipeline made no 8 bit RGB pixels: {what}")
    return np.ascontiguousarray(pixels)
