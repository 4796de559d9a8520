"""One request inside the one-shot engine: its inputs, its streams, its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamBridge, StreamEnd
from vllm_omni.engine.messages import StageFailure, StreamSource
from vllm_omni.errors import MemoryExhaustedError, OmniError
from vllm_omni.generation.memory_errors import is_out_of_memory

END_GRACE_S = 5.0
"""How long the end of a stream may take when its stage has finished and nothing else is to do."""
MAX_READY_INPUTS = 256
"""Inputs of one request made ahead of the model; beyond, frames stay with their sender's credit."""


class StreamFailedError(Exception):
    """An upstream stage did not deliver; the text goes on after the name of this stage."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class SourceStream:
    """One stream that feeds a request."""

    source: StreamSource
    bridge: StreamBridge
    has_begun: bool = False
    """A chunk of it has arrived."""
    ended_s: float | None = None
    """When the orchestrator said that the stage has finished writing, on the engine's clock."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """Lives from `Add` to its last output, or to its abort."""

    request_id: str
    state: object
    """The model's own."""
    ready: deque[object]
    """Inputs that wait for a forward, in order."""
    streams: dict[str, SourceStream]
    """Streams that have not ended."""
    deadline_s: float
    """On the engine's clock; infinity for none."""
    frames: deque[Frame] = field(default_factory=deque)
    """Arrived and not yet fed to their bridge."""
    moved_s: float = 0.0
    """When it last took an input or a frame, on the engine's clock."""
    stream_ids: tuple[str, ...] = ()
    """All its streams, ended ones too."""

    def __post_init__(self) -> None:
        self.stream_ids = tuple(self.streams)

    @property
    def is_complete(self) -> bool:
        """Nothing runs any more and nothing can come."""
        return not self.ready and not self.streams and not self.frames

    @property
    def expires_s(self) -> float:
        """When it is given up: at its deadline, or when the end of a stream must be lost."""
        if self.ready or self.frames:
            return self.deadline_s
        ends = (s.ended_s for s in self.streams.values() if s.ended_s is not None)
        return min([self.deadline_s, *(max(end, self.moved_s) + END_GRACE_S for end in ends)])

    def take_frames(self) -> None:
        """Feed what has arrived to the bridges, as far as there is room.

        Raises:
            StreamFailedError: a stream ended without its content being complete.
            Exception: a bridge could not take its frame.
        """
        while self.frames and len(self.ready) < MAX_READY_INPUTS:
            frame = self.frames.popleft()
            try:
                self._feed(frame)
            finally:
                frame.release()

    def _feed(self, frame: Frame) -> None:
        stream = self.streams[frame.stream]
        if frame.end is None:
            stream.has_begun = True
            self.ready.extend(stream.bridge.feed(frame))
            return
        del self.streams[frame.stream]
        stage = stream.source.stage
        what = "next chunk" if stream.has_begun else "first chunk"
        awaited = f"waited for the {what} of the stream of stage {stage}"
        if frame.end == "lost":
            raise StreamFailedError("replica_died", f"{awaited}: {frame.error}")
        if frame.end == "broken":
            raise StreamFailedError("request_failed", f"{awaited}: {frame.error}")
        if frame.end == "error":
            raise StreamFailedError("request_failed", f"{awaited}, which failed: {frame.error}")
        if frame.end == "abort":
            raise StreamFailedError("request_failed", f"{awaited}, which stopped writing")
        self.ready.extend(stream.bridge.end(StreamEnd(frame.end, frame.error)))

    def drop_frames(self) -> None:
        """Give the credit of frames that nobody reads back."""
        for frame in self.frames:
            frame.release()
        self.frames.clear()

    def awaited(self) -> str:
        """What the request waits for, for the text of a deadline."""
        if self.ready or not self.streams:
            return "its turn"
        return " and ".join(
            f"the {'next' if stream.has_begun else 'first'} chunk or the end of the stream of "
            f"stage {stream.source.stage}"
            for stream in self.streams.values()
        )


def failure_from(error: BaseException, stage: str) -> StageFailure:
    """What the client is told of an exception that ended one request."""
    if isinstance(error, StreamFailedError):
        return StageFailure(error.code, f"stage {stage} {error}")
    if isinstance(error, OmniError):
        return StageFailure(error.code, str(error), error.field)
    text = " ".join(str(error).split())[:500]
    if is_out_of_memory(error):
        text = f"stage {stage} has no memory for this request: {text or type(error).__name__}"
        return StageFailure(MemoryExhaustedError.code, text)
    return StageFailure("request_failed", f"stage {stage} failed: {type(error).__name__}: {text}")


Figures = Mapping[str, float]
