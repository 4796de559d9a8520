"""Media values as stages emit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
