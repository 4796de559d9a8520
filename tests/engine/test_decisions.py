from __future__ import annotations

import pytest

from tests.fakes import (
    audio_output,
    chain_pipeline,
    end_output,
    failure_output,
    text_output,
    voice_pipeline,
)
from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    Route,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.engine import decisions
from vllm_omni.engine.decisions import CompanionDone, Emit, Fail, Finish, Forward
from vllm_omni.engine.graph import RoutePlan, compile_plan, plan_of
from vllm_omni.engine.queue_messages import AddRequest
from vllm_omni.engine.request_state import OrchestratorRequestState
from vllm_omni.inputs.prompt import OmniPrompt

BOTH = frozenset({Modality.TEXT, Modality.AUDIO})


def plan_of_chain(outputs: frozenset[Modality] = BOTH, num_stages: int = 2) -> RoutePlan:
    return compile_plan(chain_pipeline(num_stages), Task.CHAT, frozenset(), outputs)


def state_of(plan: RoutePlan, *submitted: int, delta: bool = True) -> OrchestratorRequestState:
    message = AddRequest(
        request_id="a",
        plan=plan,
        prompt=None,
        omni_prompt=OmniPrompt(text="hi"),
        params=(),
        arrival_s=0.0,
        deadline_s=60.0,
        delta=delta,
    )
    state = OrchestratorRequestState.from_message(message)
    for stage_id in submitted or (plan.entry,):
        state.stage_submit_ts[stage_id] = 0.5
    return state


def test_a_delta_of_an_emitting_stage_goes_to_the_client() -> None:
    state = state_of(plan_of_chain())
    assert decisions.on_stage_output(state, 0, text_output("a", "x"), 1.0) == (Emit(),)
    assert state.first_output_ts == {0: 1.0}


def test_a_text_that_leaves_whole_has_its_first_output_when_its_first_token_was_made() -> None:
    state = state_of(plan_of_chain())
    output = text_output("a", "all of it", finished=True)
    output.first_made_s = 0.75
    decisions.on_stage_output(state, 0, output, 9.0)

    assert state.first_output_ts == {0: 0.75}
    timings = state.timings()["s0"]
    assert (timings.first_output_s, timings.finished_s) == (0.75, 9.0)


def test_the_end_of_a_stage_goes_to_the_client_and_on_to_the_next() -> None:
    state = state_of(plan_of_chain())
    output = text_output("a", "x", finished=True)
    assert decisions.on_stage_output(state, 0, output, 1.0) == (Emit(), Forward(0, 1))


def test_a_stage_that_nobody_reads_is_only_passed_on() -> None:
    state = state_of(plan_of_chain(frozenset({Modality.AUDIO})))
    assert decisions.on_stage_output(state, 0, text_output("a", "x"), 1.0) == ()
    output = text_output("a", "y", finished=True)
    assert decisions.on_stage_output(state, 0, output, 1.0) == (Forward(0, 1),)


def test_the_last_emitting_stage_finishes_the_request() -> None:
    state = state_of(plan_of_chain(frozenset({Modality.AUDIO})), 0, 1)
    output = audio_output("a", finished=True)
    assert decisions.on_stage_output(state, 1, output, 1.0) == (Emit(is_last=True), Finish())


def test_an_end_without_content_still_finishes_the_request() -> None:
    state = state_of(plan_of_chain(frozenset({Modality.AUDIO})), 0, 1)
    assert decisions.on_stage_output(state, 1, end_output("a"), 1.0) == (
        Emit(is_last=True),
        Finish(),
    )
    assert state.first_output_ts == {}


def test_two_emitting_stages_must_both_finish_in_whatever_order() -> None:
    state = state_of(plan_of_chain(), 0, 1)
    assert decisions.on_stage_output(state, 1, audio_output("a", finished=True), 1.0) == (Emit(),)
    assert decisions.on_stage_output(state, 0, text_output("a", "", finished=True), 2.0) == (
        Emit(is_last=True),
        Finish(),
    )


def test_nothing_follows_the_end() -> None:
    state = state_of(plan_of_chain())
    decisions.on_stage_output(state, 0, text_output("a", "x", finished=True), 1.0)
    assert decisions.on_stage_output(state, 0, text_output("a", "y", finished=True), 2.0) == ()


def test_a_failure_gives_the_request_up() -> None:
    state = state_of(plan_of_chain())
    assert decisions.on_stage_output(state, 0, failure_output("a", "NaN"), 1.0) == (
        Fail("request_failed", "NaN"),
    )


def test_a_companion_tells_its_parent_and_nobody_else() -> None:
    state = state_of(plan_of_chain())
    state.parent_id = "parent"
    assert decisions.on_stage_output(state, 0, text_output("a", "x"), 1.0) == ()
    assert decisions.on_stage_output(state, 0, end_output("a"), 1.0) == (CompanionDone(),)


def test_an_open_companion_holds_the_next_stage_back() -> None:
    state = state_of(plan_of_chain(frozenset({Modality.AUDIO})))
    state.open_companions = 1
    assert decisions.on_stage_output(state, 0, end_output("a"), 1.0) == ()
    state.open_companions = 0
    assert decisions.forwards_after(state, 0) == (Forward(0, 1),)


def test_a_stage_is_not_given_a_request_twice() -> None:
    state = state_of(plan_of_chain(frozenset({Modality.AUDIO})), 0, 1)
    assert decisions.on_stage_output(state, 0, end_output("a"), 1.0) == ()


def test_kept_text_is_a_copy_of_what_the_client_gets() -> None:
    state = state_of(plan_of_chain())
    first, second = text_output("a", "one "), text_output("a", "two", finished=True)
    decisions.on_stage_output(state, 0, first, 1.0)
    decisions.on_stage_output(state, 0, second, 1.0)
    (kept,) = state.kept[0]
    assert kept.text.outputs[0].text == "one two"
    assert kept.text.outputs[0].token_ids == [7, 7]
    assert (first.text.outputs[0].text, second.text.outputs[0].text) == ("one ", "two")


def test_cumulative_text_is_replaced_not_joined() -> None:
    state = state_of(plan_of_chain(), delta=False)
    decisions.on_stage_output(state, 0, text_output("a", "one"), 1.0)
    decisions.on_stage_output(state, 0, text_output("a", "one two", finished=True), 1.0)
    (kept,) = state.kept[0]
    assert kept.text.outputs[0].text == "one two"


@pytest.mark.parametrize(
    ("submitted", "first", "finished", "stage_id", "text"),
    [
        ((1,), {}, {}, 1, "'thinker' was awaited for its first output"),
        ((1, 2), {1: 1.0}, {}, 1, "'thinker' was awaited for its next output or its end"),
        (
            (1, 2),
            {1: 1.0},
            {1: 2.0},
            2,
            "'voice' was awaited for its first output (fed by the stream of thinker)",
        ),
        ((1,), {1: 1.0}, {1: 2.0}, 2, "'voice' was awaited to be given to a replica"),
    ],
)
def test_an_expired_request_says_what_it_waited_for(
    submitted: tuple[int, ...],
    first: dict[int, float],
    finished: dict[int, float],
    stage_id: int,
    text: str,
) -> None:
    plan = compile_plan(voice_pipeline(), Task.CHAT, frozenset(), BOTH)
    state = state_of(plan, *submitted)
    state.first_output_ts.update(first)
    state.finished_ts.update(finished)
    assert decisions.describe_wait(state, 1.5) == (
        stage_id,
        f"deadline of 1.5 s exceeded: stage {text}",
    )


def test_a_stage_joins_its_sources_with_one_bridge() -> None:
    stages = tuple(
        StageConfig(name=name, kind=StageKind.AUTOREGRESSIVE, emits=emits)
        for name, emits in (("a", None), ("b", None), ("c", Modality.TEXT))
    )
    edges = (
        Edge(source="a", target="b", bridge="m:x"),
        Edge(source="a", target="c", bridge="m:x"),
        Edge(source="b", target="c", bridge="m:y"),
    )
    pipeline = PipelineConfig(
        model_type="fake", stages=stages, edges=edges, entries={Task.CHAT: "a"}
    )
    with pytest.raises(ValueError, match="into stage 'c' name several prompt bridges: m:x, m:y"):
        plan_of(pipeline, Route((0, 1, 2), 0, frozenset({2}), edges))
