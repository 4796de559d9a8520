"""What the orchestrator knows about one request. Changed only by `decisions.py` and dispatch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vllm_omni.engine.graph import RoutePlan
from vllm_omni.engine.messages import StageOutput, StreamSource
from vllm_omni.engine.queue_messages import AddRequest
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.request_output import StageTimings


class OrchestratorRequestState(msgspec.Struct, gc=False):
    """One request between admission and release. Times are on `time.monotonic`."""

    request_id: str
    plan: RoutePlan
    omni_prompt: OmniPrompt
    params: tuple[object, ...]
    arrival_s: float
    deadline_s: float
    delta: bool
    options: Mapping[str, object]
    contexts: Mapping[str, dict[str, object]]
    open_emitting: int
    """Emitting stages that have not finished."""
    stage_submit_ts: dict[int, float]
    """By stage id: when it was given to that stage. A stage not in here was never entered."""
    session_id: str | None = None
    parent_id: str | None = None
    """Set for a companion: the request it belongs to."""
    open_companions: int = 0
    streaming_enabled: bool = False
    """Its input is updated while it runs."""
    first_output_ts: dict[int, float] = {}
    finished_ts: dict[int, float] = {}
    kept: dict[int, list[StageOutput]] = {}
    """Outputs of stages that feed a prompt bridge, one for each prompt of that stage."""
    audio_s: dict[int, float] = {}
    target_addresses: dict[int, str] = {}
    """By stage id: where upstream stages were told to push this request's chunks."""
    attempt: int = 1
    parked: AddRequest | None = None
    """Set while it waits for a stage to get a replica back; no stage has it."""

    @classmethod
    def from_message(cls, message: AddRequest) -> OrchestratorRequestState:
        return cls(
            message.request_id,
            message.plan,
            message.omni_prompt,
            message.params,
            message.arrival_s,
            message.deadline_s,
            message.delta,
            message.options,
            message.contexts,
            len(message.plan.emitting),
            {},
            message.session_id,
            streaming_enabled=message.session_id is not None,
            attempt=message.attempt,
        )

    def is_ready_for(self, target: int) -> bool:
        """All that feeds this stage's prompt is final, and nothing must be waited for.

        A session's stage gets a prompt with every turn, any other stage one.
        """
        if self.open_companions or (target in self.stage_submit_ts and not self.streaming_enabled):
            return False
        finished = self.finished_ts
        for source in self.plan.stages[target].prompt_sources:  # noqa: SIM110  twice as fast
            if source not in finished:
                return False
        return True

    def unfinished_stages(self) -> list[int]:
        """Stages that have it and were not heard to finish it."""
        return [stage_id for stage_id in self.stage_submit_ts if stage_id not in self.finished_ts]

    def stream_sources(self, stage_id: int) -> tuple[StreamSource, ...]:
        """The streams this stage receives for this request."""
        return tuple(
            StreamSource(
                self.request_id + edge.label,
                edge.source_name,
                edge.bridge,
                self.contexts.get(edge.source_name, {}),
            )
            for edge in self.plan.stages[stage_id].stream_sources
        )

    def timings(self) -> dict[str, StageTimings]:
        """By stage name, in seconds since arrival."""
        arrival, first, finished = self.arrival_s, self.first_output_ts, self.finished_ts
        submitted = self.stage_submit_ts
        return {
            stage.name: StageTimings(
                submitted_s=submitted[stage_id] - arrival,
                attempt=self.attempt,
                first_output_s=first[stage_id] - arrival if stage_id in first else None,
                finished_s=finished[stage_id] - arrival if stage_id in finished else None,
            )
            for stage_id, stage in self.plan.stages.items()
            if stage_id in submitted
        }
