"""Frames as an MP4 that players and browsers open, and its small pictures. In the media pool."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_omni.entrypoints.openai.media.images import contact_sheet, encode_image
from vllm_omni.outputs.media import Frames

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

MEDIA_TYPE: Final = "video/mp4"
_CODEC: Final = "libx264"
_OPTIONS: Final = {"crf": "18", "preset": "veryfast"}
_THUMBNAIL_PIXELS: Final = 512
_SHEET_FRAMES: Final = 25
_SHEET_PIXELS: Final = 160
_MAX_RATE_DENOMINATOR: Final = 1001
_NUM_THREADS: Final = 2


def write_mp4(frames: Frames, path: Path) -> None:
    """H.264 with 4:2:0 colours and its index in front. An odd edge is repeated once: the codec
    takes even sizes only."""
    import av

    assert frames.frame_rate, "a video has a frame rate"
    pixels = _even(frames.array())
    rate = Fraction(frames.frame_rate).limit_denominator(_MAX_RATE_DENOMINATOR)
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(_CODEC, rate=rate, options=_OPTIONS)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = _NUM_THREADS
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


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


def _small(picture: NDArray[np.uint8]) -> Image:
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((_SHEET_PIXELS, _SHEET_PIXELS))
    return image


def _even(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    import numpy as np

    odd_rows, odd_columns = pixels.shape[1] % 2, pixels.shape[2] % 2
    if not (odd_rows or odd_columns):
        return pixels
    return np.pad(pixels, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
