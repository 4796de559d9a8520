"""Codes on their way into a vocoder: the bridge that reads frames of them, and the ramp of chunks.

The first chunks are small, so that sound comes early; later ones are larger, since they cost less
for each frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni.distributed.omni_connectors.base import Frame
    from vllm_omni.engine.bridge import StreamEnd
    from vllm_omni.engine.messages import StreamSource

Codes = NDArray[np.int32]
"""`[frames, groups]`."""

DEFAULT_RAMP: Final = (1, 2, 4, 8)


_KINDS: Final = ("codes", "tokens")
"""Both are 32 bit little-endian numbers below 2^31."""


@final
class EndOfCodes:
    """The input after the last codes: what waits for a full chunk is decoded now."""


END_OF_CODES: Final = EndOfCodes()


class CodeFrames:
    """A `StreamBridge`: frames of codes in, arrays of codes out, then `END_OF_CODES`.

    A talker with one group of codes sends its token ids; those are its codes.
    """

    def __init__(self, source: StreamSource) -> None:
        self._stage = source.stage

    def feed(self, frame: Frame) -> list[object]:
        groups = 1 if frame.meta.get("kind") == "tokens" else frame.meta.get("groups")
        if frame.meta.get("kind") not in _KINDS or not isinstance(groups, int) or groups < 1:
            raise ValueError(f"stage {self._stage} sent {frame.meta!r} where codes are read")
        values = np.frombuffer(frame.payload, dtype="<i4")
        # The payload is the sender's memory: it goes back as soon as this returns.
        return [values.reshape(-1, groups).copy()] if values.size else []

    def end(self, end: StreamEnd) -> list[object]:
        """Speech that was cut by its limit is spoken as far as it goes."""
        return [END_OF_CODES]


@dataclass(frozen=True, slots=True)
class ChunkRamp:
    """Frames of the first, the second, ... chunk; the last number is that of all later ones."""

    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, value: object) -> ChunkRamp:
        """Read the stage's option `chunk_ramp`.

        Raises:
            ConfigError: not a list of positive numbers.
        """
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise ConfigError(f"chunk_ramp must be a list of frame counts, got {value!r}")
        for size in value:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"chunk_ramp: {size!r} is not a positive number of frames")
        return cls(tuple(value))

    def size(self, index: int) -> int:
        """Frames of the `index`-th chunk of a request."""
        return self.sizes[min(index, len(self.sizes) - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Frames to be decoded together."""

    codes: Codes
    """New frames, then as many later ones as are looked at."""
    num_new: int
    """Frames whose sound is wanted."""
    size: int
    """Frames of a full chunk in its place; the last one of a request may have fewer."""
    is_last: bool
    """No frame follows: neither in this chunk nor after it."""


def _no_codes() -> Codes:
    return np.empty((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class CodeBuffer:
    """What a request waits with. Never changed: a chunk whose decoding fails is taken again."""

    pending: Codes = field(default_factory=_no_codes)
    num_chunks: int = 0

    def take(
        self, item: object, ramp: ChunkRamp, lookahead: int = 0
    ) -> tuple[list[Chunk], CodeBuffer]:
        """The chunks that are complete with this input, and what is left after them.

        Args:
            item: codes, or `END_OF_CODES`.
            lookahead: later frames that a chunk has to see, unless there are none.
        """
        has_ended = isinstance(item, EndOfCodes)
        pending = self.pending
        if not has_ended:
            assert isinstance(item, np.ndarray), f"{item!r} is not an input of a vocoder"
            pending = np.concatenate([pending, item]) if len(pending) else item
        chunks: list[Chunk] = []
        while len(pending):
            size = ramp.size(self.num_chunks + len(chunks))
            if not has_ended and len(pending) < size + lookahead:
                break
            seen, pending = pending[: size + lookahead], pending[size:]
            is_last = has_ended and not len(pending)
            chunks.append(Chunk(seen, min(size, len(seen)), size, is_last))
        return chunks, CodeBuffer(pending, self.num_chunks + len(chunks))
