"""What the engine has its ranks do, and what they answer: plain values that could cross a process.

States, latents and embeddings never leave the worker; here are ids and results only.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.messages import StageFailure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Lane(enum.StrEnum):
    """Where jobs run one after another; the two lanes run side by side."""

    DENOISE = enum.auto()
    """Denoise steps and whole runs."""
    MEDIA = enum.auto()
    """Text and image encoding, decoding, previews."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Encode, or find the conditioning in the cache, and make the initial latents."""

    request: DiffusionRequest


@dataclass(frozen=True, slots=True)
class Step:
    """One denoise step of each, together."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    request_id: str


@dataclass(frozen=True, slots=True)
class Preview:
    request_id: str


@dataclass(frozen=True, slots=True)
class Run:
    """A whole request of a pipeline without steps."""

    request: DiffusionRequest


Job = Prepare | Step | Decode | Preview | Run


@dataclass(frozen=True, slots=True)
class Prepared:
    request_id: str
    key: Hashable = None
    step: int = 0
    """Steps that are already behind it."""
    num_steps: int = 0
    failure: StageFailure | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    request_ids: tuple[str, ...]
    failures: Mapping[str, StageFailure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Made:
    """The pixels of one request; of a run that was told to stop neither pixels nor failure."""

    request_id: str
    pixels: NDArray[np.uint8] | None = None
    failure: StageFailure | None = None


@dataclass(frozen=True, slots=True)
class Previewed:
    request_id: str
    pixels: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Progressed:
    """A whole run got this far; not the end of its job."""

    request_id: str
    step: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The rank cannot go on: it does not pass its self-test. The replica ends."""

    error: BaseException


Result = Prepared | Stepped | Made | Previewed | Progressed | Broken
