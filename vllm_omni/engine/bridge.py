"""Bridges: a family's functions from upstream payload to downstream input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.messages import StageOutput, StreamSource
from vllm_omni.inputs.prompt import OmniPrompt


class PromptBridge(Protocol):
    """Finished upstream outputs to the target's prompt. Runs in the API process: text only.

    `upstream` holds the last outputs of each source stage by name, one for each prompt that
    stage was given. Raises BadRequestError when the result cannot be served.
    """

    def __call__(
        self, prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]
    ) -> OmniPrompt: ...


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ended. Without one, it has not ended."""

    reason: str
    """`stop`, `length`, `abort` or `error`."""
    message: str = ""
    """For `error`: what happened."""


class StreamBridge(Protocol):
    """Turns one request's stream into inputs of the target stage. Runs in the target's replica.

    One per request and source, made by `factory(source: StreamSource) -> StreamBridge`. The
    inputs it returns are what the target's model takes (for a speaking stage: pieces of text).
    """

    def feed(self, frame: Frame) -> list[object]:
        """Take one chunk; return the inputs that are ready now, in order."""

    def end(self, end: StreamEnd) -> list[object]:
        """The stream ended; return what is left."""


class StreamBridgeFactory(Protocol):
    def __call__(self, source: StreamSource) -> StreamBridge: ...
