"""What `Omni.generate` returns and `AsyncOmni.generate` yields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_omni.outputs.media import AudioChunk, Frames, StepProgress

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm.outputs import CompletionOutput, RequestOutput

    from vllm_omni.errors import OmniError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """When a stage of a request did what, in seconds since the request arrived."""

    submitted_s: float
    attempt: int = 1
    """2 when the request was submitted again, since its first replica had died."""
    first_output_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True, kw_only=True)
class OmniRequestOutput:
    """One step of a request (streamed), or all of it (offline and at the end)."""

    request_id: str
    stage: str | None = None
    """Name of the stage this output comes from; None for a whole result."""
    index: int = 0
    """Which of the request's `n` choices."""
    finished: bool = False
    """True on the last output of the request, all stages included."""
    request_output: RequestOutput | None = None
    """vLLM's own output of a text stage."""
    audio: AudioChunk | None = None
    """New samples when streamed, all samples in a whole result."""
    audios: tuple[AudioChunk | None, ...] = ()
    """In a whole result of several choices: the samples of each; `audio` is the first one's."""
    images: list[Image] = field(default_factory=list)
    """Pictures that are done; in a whole result those of all choices, in order."""
    video: Frames | None = None
    """In a whole result the first choice's."""
    videos: tuple[Frames | None, ...] = ()
    """In a whole result of several choices: the video of each."""
    preview: Image | None = None
    """What a picture looks like so far, when streamed."""
    progress: StepProgress | None = None
    """How far the choice is, when streamed."""
    error: OmniError | None = None
    """Why this request failed; only in offline batches, elsewhere it is raised."""
    timings: dict[str, StageTimings] = field(default_factory=dict)
    """By stage name; complete when `finished`."""

    @property
    def outputs(self) -> list[CompletionOutput]:
        """vLLM's completion outputs; empty when no text stage ran."""
        return self.request_output.outputs if self.request_output is not None else []

    @property
    def text(self) -> str:
        """Text of the first choice; empty when there is none."""
        return self.outputs[0].text if self.outputs else ""
