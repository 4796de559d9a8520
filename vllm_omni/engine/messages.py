"""What the orchestrator gives a stage client, and what it gets back.

In-process values of the API process. What crosses to a replica is each client's own business:
vLLM's structs for AUTOREGRESSIVE, `generation/wire.py` for our engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.outputs.media import AudioChunk, Frames, StepProgress

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


class StreamTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stage pushes its chunks for one request."""

    address: str
    """Data-plane address of the receiving replica."""
    stream: str
    """Stream id, unique per request, source stage and incarnation."""
    conditions: bool = False
    """It conditions another autoregressive stage: prompt and captured rows travel too."""


class StreamSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream a stage will receive for one request."""

    stream: str
    stage: str
    """Name of the stage that writes it."""
    bridge: str
    """`module:name` of the `StreamBridge` factory."""
    context: dict[str, Any] = {}
    """Plain facts about the source that the bridge needs (for a text stage: `tokenizer_dir`,
    `stop`, `include_stop_str_in_output`, `skip_special_tokens`)."""


class StageRequest(msgspec.Struct):
    """One request as one stage sees it."""

    request_id: str
    """Unique among all requests of all stages while it lives."""
    stage_id: int
    prompt: object
    """What the stage's client takes: an `OmniPrompt`, or what the client's `prepare` returned.
    None when the stage is fed by `sources` alone."""
    params: object
    """`vllm.SamplingParams` for AUTOREGRESSIVE, `SpeechParams` for a stage that speaks,
    `OmniDiffusionSamplingParams` for DIFFUSION."""
    sources: tuple[StreamSource, ...] = ()
    targets: tuple[StreamTarget, ...] = ()
    deadline_s: float | None = None
    """On `time.monotonic`; a replica drops the request by itself after it."""
    options: Mapping[str, object] = {}
    """vLLM's per-request options (`lora_request`, `priority`, `trace_headers`, ...)."""


class StageFailure(msgspec.Struct, frozen=True):
    """Why one request failed in a stage."""

    code: str
    """`code` of an error class in `errors.py`."""
    message: str
    field: str | None = None


class StageOutput(msgspec.Struct):
    """One output of one stage for one request."""

    request_id: str
    """As in the `StageRequest`."""
    finished: bool = False
    text: Any = None
    """`vllm.RequestOutput` of a text stage."""
    audio: AudioChunk | None = None
    frames: Frames | None = None
    """The whole picture or video."""
    preview: Frames | None = None
    """What the picture looks like so far."""
    progress: StepProgress | None = None
    failure: StageFailure | None = None
    """Set: the stage gave this request up; `finished` is True."""
    first_made_s: float | None = None
    """On `time.monotonic`: when the first piece of the text was made, where it was held back."""

    @property
    def has_content(self) -> bool:
        """There is something for the client beyond how far the stage is."""
        return (
            self.text is not None
            or self.audio is not None
            or self.frames is not None
            or self.preview is not None
        )

    def merged_with(self, later: StageOutput, *, delta: bool = True) -> StageOutput:
        """This output and a later one of the same stage and request as one (a slow client).

        With `delta` texts are joined; without, they are cumulative and the later one stands.
        """
        text: RequestOutput | None = self.text
        if text is not None and later.text is not None:
            text.add(later.text, aggregate=delta)
        audio = self.audio
        if audio is not None and later.audio is not None:
            audio = audio.merged_with(later.audio)
        return StageOutput(
            self.request_id,
            later.finished,
            text if text is not None else later.text,
            audio if audio is not None else later.audio,
            later.frames or self.frames,
            later.preview or self.preview,
            later.progress or self.progress,
            later.failure,
            self.first_made_s if self.first_made_s is not None else later.first_made_s,
        )
