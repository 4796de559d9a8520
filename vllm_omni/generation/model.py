"""What a model of the one-shot engine is: the seam between engine and family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vllm_omni.outputs.media import AudioChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What a replica gives its model when it loads."""

    model_dir: Path
    device: str
    num_threads: int
    options: Mapping[str, object] = field(default_factory=dict)
    """The stage's `engine_args`; the model refuses names it does not know (ConfigError)."""


@dataclass(slots=True)
class Work:
    """One input of one request, ready for a forward."""

    state: object
    """What `start` returned for this request."""
    item: object
    """One input: what the bridge produced, or what the prompt was split into."""
    is_last: bool
    """No further input of this request follows."""


class OneShotModel(Protocol):
    """Runs in the replica's process; every method is called from the engine's one thread."""

    def __init__(self, context: ModelContext) -> None:
        """Load. Raises ConfigError or OSError with one clear line."""

    def self_test(self) -> None:
        """One real forward, before the replica calls itself ready; raises when it does not work."""

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        """Begin a request: returns its state and the inputs its prompt makes (none when it is fed
        by a stream). Raises BadRequestError."""

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        """One forward for several requests: an output, nothing, or the error of that request alone
        for each. An exception fails the whole batch, which the engine then runs one by one; when
        memory ran out, inputs are given once more. So a state moves on only with its result."""

    def finish(self, state: object) -> None:
        """The request is over, whatever way; drop what it holds."""
