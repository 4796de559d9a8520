"""What conditions an autoregressive stage beside its own tokens: plain data, made by a bridge.

Position `p` of a conditioned request is fed with `base[p]` and `condition[p]`. The bridge gives
both for the prompt and, while the upstream stage writes, the conditions of later positions; the
model itself makes the base of later positions out of what it sampled. Built in the engine core's
process, turned into rows on the worker's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource

SOURCES_KEY: Final = "omni_sources"
"""Key of `SamplingParams.extra_args`: `[[stream, stage, bridge, context], ...]`."""

REPETITION_KEY: Final = "omni_repetition_penalty"
"""Key of `SamplingParams.extra_args`: the penalty, which the stage applies itself."""

VOICE_KEY: Final = "voice"
"""Key of `SamplingParams.extra_args`: the voice a request named; absent for the default."""

KIND_PROMPT: Final = "prompt"
"""A frame with the source's prompt: uint32 token ids. The first of its stream."""
KIND_TOKENS: Final = "tokens"
"""A frame with the new token ids of one step: uint32."""
KIND_ROWS: Final = "rows"
"""A frame with captured rows: meta `layer` (index in the edge's `Capture.layers`), `spans`
(`[[first position, count], ...]`), `dtype`, `width`."""
KIND_POSITIONS: Final = "positions"
"""A frame with the rotary positions of the source's prompt: int32, `[3, tokens]`."""
KIND_CODES: Final = "codes"
"""A frame of codes for a vocoder: int32, `[frames, groups]`; meta `groups`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for consecutive positions, in the form that `ConditionedModel.rows` reads."""

    kind: str
    """The family's own word for how they become rows."""
    data: npt.NDArray[Any]
    """First axis: positions."""

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionedPrompt:
    """The prompt of a conditioned request."""

    base: Sequence[Rows]
    conditions: Sequence[Rows]
    """As many positions as `base`, in sum."""
    token_ids: Sequence[int]
    """What the engine takes for the prompt: as many. Penalties look at them, nothing else does."""
    positions: npt.NDArray[np.int64] | None = None
    """Rotary positions `[3, tokens]`; None: 0, 1, 2, ..."""

    def __len__(self) -> int:
        return sum(map(len, self.base))


@dataclass(slots=True)
class Conditioning:
    """What one frame, or the end of a stream, adds to a request."""

    prompt: ConditionedPrompt | None = None
    """Set once, before any steps: the request can begin."""
    steps: list[Rows] = field(default_factory=list)
    """Conditions of the next positions after those that are known."""
    is_last: bool = False
    """Later positions have the model's constant condition: nothing more is waited for."""
    is_empty: bool = False
    """There is nothing to say: the request ends without running."""


@dataclass(frozen=True, slots=True)
class ConditioningContext:
    """What a bridge may know of the stage it feeds and of its request."""

    hf_config: Any
    """The target stage's transformers config."""
    extra_args: Mapping[str, Any]
    """Of the request's sampling params (`VOICE_KEY`)."""


class ConditioningBridge(Protocol):
    """Turns one request's stream into conditioning. Runs in the target's engine core process.

    Cheap: the busy loop waits for it. No tensors, no device.
    """

    def feed(self, frame: Frame) -> Conditioning:
        """Take one frame; `frame.payload` is valid until this returns."""

    def end(self, end: StreamEnd) -> Conditioning:
        """The stream ended well (`stop` or `length`); the result has `is_last` or `is_empty`."""


class ConditioningBridgeFactory(Protocol):
    def __call__(
        self, source: StreamSource, context: ConditioningContext
    ) -> ConditioningBridge: ...
