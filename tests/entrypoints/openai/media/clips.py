"""Pictures and clips as a client has them, made on the spot."""

from __future__ import annotations

import io

import av
import numpy as np
from PIL import Image


def png(width: int = 32, height: int = 24, *, seed: int = 0) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(
    num_frames: int = 8,
    *,
    rate: int = 4,
    size: tuple[int, int] = (64, 48),
    sound_s: float = 0.0,
    seed: int = 0,
) -> bytes:
    """A clip of moving stripes, with a tone when `sound_s` is not 0."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=rate)
        video.width, video.height = size
        video.pix_fmt = "yuv420p"
        sound = container.add_stream("aac", rate=16000, layout="mono") if sound_s else None
        for i in range(num_frames):
            columns = (np.arange(size[0]) * (3 + seed) + 40 * i) % 256
            pixels = np.broadcast_to(columns[None, :, None], (size[1], size[0], 3))
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            time_s = np.arange(int(sound_s * 16000)) / 16000
            tone = (0.3 * np.sin(2 * np.pi * (300 + 50 * seed) * time_s)).astype(np.float32)
            wave = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
            wave.sample_rate = 16000
            container.mux(sound.encode(wave))
            container.mux(sound.encode(None))
    return buffer.getvalue()
