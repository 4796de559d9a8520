"""A prompt as the engine takes it: text or tokens, with decoded media beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_omni.config.pipeline import Modality

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AudioInput:
    """One decoded audio item: mono float32 samples in [-1, 1], shape [num_samples]."""

    samples: NDArray[np.float32]
    sample_rate_hz: int


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One decoded picture: 8 bit RGB, [height, width, 3]; a mask has no third dimension."""

    pixels: NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniPrompt:
    """Exactly one of `text`, `token_ids` and `engine_input` carries the words.

    Where an upstream stage turns media into text, the pipeline's placeholder stands in `text`
    once for each media item, in order.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    engine_input: Mapping[str, object] | None = None
    """A prompt that vLLM's renderer made; `text` may hold its source beside it."""
    audio: tuple[AudioInput, ...] = ()
    images: tuple[ImageInput, ...] = ()
    """Pictures to start from, decoded: for a diffusion stage."""
    mask: ImageInput | None = None
    """Which pixels of the first picture are painted anew: 255 where they are, 0 where kept."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """More fields of vLLM's own prompt (`multi_modal_data` of a stage that reads media itself)."""

    @property
    def modalities(self) -> frozenset[Modality]:
        """Modalities this prompt brings besides text."""
        return frozenset({Modality.AUDIO}) if self.audio else frozenset()
