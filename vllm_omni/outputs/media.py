"""Media values as stages emit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class AudioChunk(msgspec.Struct, frozen=True, gc=False):
    """Consecutive samples of one request's audio."""

    pcm: bytes
    """Mono, 16 bit signed little-endian."""
    sample_rate_hz: int

    def __repr__(self) -> str:
        return f"<AudioChunk {self.num_samples} samples at {self.sample_rate_hz} Hz>"

    @property
    def num_samples(self) -> int:
        return len(self.pcm) // 2

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate_hz

    def samples(self) -> NDArray[np.float32]:
        """Samples in [-1, 1], shape [num_samples]."""
        import numpy as np

        return np.frombuffer(self.pcm, dtype="<i2").astype(np.float32) / 32768.0

    def merged_with(self, later: AudioChunk) -> AudioChunk:
        assert self.sample_rate_hz == later.sample_rate_hz, "one stream has one sample rate"
        return AudioChunk(self.pcm + later.pcm, self.sample_rate_hz)


class Frames(msgspec.Struct, frozen=True, gc=False):
    """Pixels of one picture, or of a video's frames in order."""

    pixels: bytes | memoryview
    """RGB, 8 bit, rows from the top: [num_frames, height, width, 3]."""
    num_frames: int
    height: int
    width: int
    frame_rate: float | None = None
    """Frames a second; None: a picture."""

    def __repr__(self) -> str:
        return f"<Frames {self.num_frames} of {self.width}x{self.height}>"

    @property
    def is_video(self) -> bool:
        return self.frame_rate is not None

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.frame_rate if self.frame_rate else 0.0

    @classmethod
    def of(cls, array: NDArray[np.uint8], frame_rate: float | None = None) -> Frames:
        """From [height, width, 3] or [num_frames, height, width, 3]; shares the array's memory."""
        import numpy as np

        shape = array.shape if array.ndim == 4 else (1, *array.shape)
        num_frames, height, width, num_channels = shape
        assert num_channels == 3, "pixels are RGB"
        assert array.dtype.name == "uint8", "pixels have 8 bits"
        pixels = np.ascontiguousarray(array).data.cast("B")
        return cls(pixels, num_frames, height, width, frame_rate)

    def array(self) -> NDArray[np.uint8]:
        """[num_frames, height, width, 3], without a copy and read-only."""
        import numpy as np

        flat = np.frombuffer(self.pixels, dtype=np.uint8)
        return flat.reshape(self.num_frames, self.height, self.width, 3)

    def image(self) -> Image:
        """The first frame, without a copy."""
        from PIL import Image

        size_bytes = self.height * self.width * 3
        return Image.frombuffer(
            "RGB",
            (self.width, self.height),
            self.pixels[:size_bytes],  # type: ignore[arg-type]  # any buffer does
            "raw",
            "RGB",
            0,
            1,
        )


class StepProgress(msgspec.Struct, frozen=True, gc=False):
    """How far a request is."""

    step: int
    """Denoise steps done."""
    num_steps: int
