"""Frames as an MP4 that players and browsers open."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_omni.outputs.media import Frames

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CODEC: Final = "libx264"
_OPTIONS: Final = {"crf": "18", "preset": "veryfast"}
_MAX_RATE_DENOMINATOR: Final = 1001
_NUM_THREADS: Final = 2


def write_mp4(frames: Frames, path: Path) -> None:
    """H.264 with 4:2:0 colours and its index in front. An odd edge is repeated once: the codec
    takes even sizes only. Blocks."""
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


def _even(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    import numpy as np

    odd_rows, odd_columns = pixels.shape[1] % 2, pixels.shape[2] % 2
    if not (odd_rows or odd_columns):
        return pixels
    return np.pad(pixels, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
