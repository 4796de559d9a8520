"""Small pictures of a video. Runs in the media pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from PIL import Image

from vllm_omni.entrypoints.openai.media.images import contact_sheet, encode_image
from vllm_omni.outputs.media import Frames

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_THUMBNAIL_PIXELS: Final = 512
_SHEET_FRAMES: Final = 25
_SHEET_PIXELS: Final = 160


def thumbnail(frames: Frames) -> bytes:
    """The first frame as WebP, at most 512 pixels wide and high."""
    image = frames.image().copy()
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    return encode_image(image, "webp", 80)


def spritesheet(frames: Frames) -> bytes:
    """At most 25 frames, evenly spread, five in a row, as JPEG."""
    num = min(_SHEET_FRAMES, frames.num_frames)
    chosen = [round(i * (frames.num_frames - 1) / max(num - 1, 1)) for i in range(num)]
    array = frames.array()
    return encode_image(contact_sheet([_small(array[i]) for i in chosen]), "jpeg", 80)


def _small(picture: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(picture)
    image.thumbnail((_SHEET_PIXELS, _SHEET_PIXELS))
    return image
