"""From a model's samples to the audio it emits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_omni.outputs.media import AudioChunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class NonFiniteAudioError(RuntimeError):
    """The model's samples hold NaN or infinity; the request fails instead of crackling."""


def audio_chunk(samples: NDArray[np.floating], sample_rate_hz: int) -> AudioChunk:
    """Samples in [-1, 1], clipped, as a chunk.

    Raises:
        NonFiniteAudioError: there is a NaN or infinity among them.
    """
    import numpy as np

    if not np.isfinite(samples).all():
        raise NonFiniteAudioError("the model's audio holds NaN or infinite samples")
    scaled = np.clip(samples, -1.0, 1.0) * 32767.0
    return AudioChunk(np.rint(scaled).astype("<i2").tobytes(), sample_rate_hz)
