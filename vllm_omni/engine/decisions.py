"""What an event leads to: plain functions of a request's state that return actions.

They may update the state they are given. No queue, socket, task or clock in here.
"""

from __future__ import annotations

import copy
from typing import Final

import msgspec

from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.request_state import OrchestratorRequestState


class Emit(msgspec.Struct, frozen=True):
    """Hand the output to the client."""

    is_last: bool = False


class Forward(msgspec.Struct, frozen=True):
    """Make the prompt of `target` from finished outputs and submit it."""

    source: int
    target: int


class Fail(msgspec.Struct, frozen=True):
    """Give the request up."""

    code: str
    message: str
    field: str | None = None


class Finish(msgspec.Struct, frozen=True):
    """The client has everything: release the request."""


class CompanionDone(msgspec.Struct, frozen=True):
    """A companion finished: its parent may go on."""


Action = Emit | Forward | Fail | Finish | CompanionDone

NOTHING: Final[tuple[Action, ...]] = ()
_EMIT: Final[tuple[Action, ...]] = (Emit(),)
_LAST: Final[tuple[Action, ...]] = (Emit(is_last=True), Finish())
_COMPANION_DONE: Final[tuple[Action, ...]] = (CompanionDone(),)


def on_stage_output(
    state: OrchestratorRequestState, stage_id: int, output: StageOutput, now_s: float
) -> tuple[Action, ...]:
    """Decide what one output of one stage leads to."""
    if stage_id in state.finished_ts:
        return NOTHING
    if output.failure is not None:
        state.finished_ts[stage_id] = now_s
        failure = output.failure
        return (Fail(failure.code, failure.message, failure.field),)
    stage = state.plan.stages[stage_id]
    has_content = output.has_content
    if has_content:
        if stage_id not in state.first_output_ts:
            made_s = output.first_made_s
            state.first_output_ts[stage_id] = now_s if made_s is None else made_s
        if stage.prompt_targets:
            _keep(state, stage_id, output, is_shared=stage.emits)
    is_news = has_content or output.progress is not None
    emit = _EMIT if is_news and stage.emits and state.parent_id is None else NOTHING
    if not output.finished:
        return emit
    state.finished_ts[stage_id] = now_s
    return _on_stage_finished(state, stage_id, emit)


def _on_stage_finished(
    state: OrchestratorRequestState, stage_id: int, emit: tuple[Action, ...]
) -> tuple[Action, ...]:
    if state.parent_id is not None:
        return _COMPANION_DONE
    stage = state.plan.stages[stage_id]
    if stage.emits:
        state.open_emitting -= 1
        if not state.open_emitting:
            return _LAST
    return emit + forwards_after(state, stage_id) if stage.prompt_targets else emit


def forwards_after(state: OrchestratorRequestState, source: int) -> tuple[Action, ...]:
    """The stages whose prompts can be made, now that `source` has finished."""
    if source not in state.finished_ts:
        return NOTHING
    return tuple(
        Forward(source, target)
        for target in state.plan.stages[source].prompt_targets
        if state.is_ready_for(target)
    )


def _keep(
    state: OrchestratorRequestState, stage_id: int, output: StageOutput, *, is_shared: bool
) -> None:
    """Remember an output for the bridge; what the client also reads is copied, not shared."""
    if not is_shared:
        state.kept.setdefault(stage_id, []).append(output)
        return
    mine = StageOutput(output.request_id, output.finished, _own_text(output.text), output.audio)
    kept = state.kept.setdefault(stage_id, [])
    if kept:
        kept[0] = kept[0].merged_with(mine, delta=state.delta)
    else:
        kept.append(mine)


def _own_text(text: object) -> object:
    """A copy of a `RequestOutput` that can be added to without touching the original."""
    if text is None:
        return None
    own = copy.copy(text)
    own.outputs = [copy.copy(completion) for completion in text.outputs]  # type: ignore[attr-defined]
    for completion in own.outputs:  # type: ignore[attr-defined]
        completion.token_ids = list(completion.token_ids)
        completion.logprobs = list(completion.logprobs) if completion.logprobs else None
    return own


def on_update(state: OrchestratorRequestState, stage_id: int, now_s: float) -> None:
    """A session gets more input: what the stage had finished is open again."""
    state.streaming_enabled = True
    state.stage_submit_ts[stage_id] = now_s
    if state.finished_ts.pop(stage_id, None) is not None and stage_id in state.plan.emitting:
        state.open_emitting += 1


def describe_wait(state: OrchestratorRequestState, timeout_s: float) -> tuple[int, str]:
    """Which stage an expired request waited for, and an error text that says for what."""
    for stage_id, stage in state.plan.stages.items():
        if stage_id in state.finished_ts:
            continue
        if stage_id not in state.stage_submit_ts:
            what = "to be given to a replica"
        elif stage_id not in state.first_output_ts:
            sources = " and ".join(edge.source_name for edge in stage.stream_sources)
            fed = f" (fed by the stream of {sources})" if sources else ""
            what = f"for its first output{fed}"
        else:
            what = "for its next output or its end"
        return stage_id, (
            f"deadline of {timeout_s:g} s exceeded: stage {stage.name!r} was awaited {what}"
        )
    return state.plan.entry, f"deadline of {timeout_s:g} s exceeded"
