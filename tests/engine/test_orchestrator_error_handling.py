"""A stage that dies takes its own requests with it and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.rig import AUDIO, TEXT, Rig, is_alive, running
from tests.fakes import (
    FakeStageClient,
    audio_output,
    chain_pipeline,
    failure_output,
    says,
    settle,
    speaks,
    text_output,
    voice_pipeline,
)
from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.fault_isolation import ENGINE_DIED, dead_text
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.queue_messages import ErrorMessage, UpdateRequest
from vllm_omni.engine.request_state import OrchestratorRequestState
from vllm_omni.errors import BadRequestError, RequestFailedError, StageUnavailableError
from vllm_omni.inputs.prompt import OmniPrompt


def one_stage(num_replicas: int = 1) -> tuple[Rig, list[FakeStageClient]]:
    clients = [FakeStageClient(replica_id=i) for i in range(num_replicas)]
    pipeline = chain_pipeline(1)
    return Rig([clients], pipeline), clients


def register(
    rig: Rig, request_id: str, *, entered: int | None = 0, bound: int | None = None
) -> OrchestratorRequestState:
    """A request as if it had gone through admission."""
    state = OrchestratorRequestState.from_message(rig.request(request_id))
    rig.orchestrator.request_states[request_id] = state
    if entered is not None:
        state.stage_submit_ts[entered] = 0.0
    if bound is not None:
        rig.pools[0]._bindings[request_id] = bound
    return state


async def test_the_only_replica_dies_on_poll() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        await rig.add("a")
        client.crash("CUDA out of memory")
        (error,) = await rig.errors()
        assert (error.fatal, error.request_id, error.stage_id) == (True, "a", 0)
        assert "CUDA out of memory" in error.error
        assert error.type == "error"
        assert rig.pools[0].live_replica_ids() == []
        assert rig.known == set()
        assert is_alive(rig)


async def test_one_of_two_replicas_dies() -> None:
    rig, clients = one_stage(2)
    async with running(rig):
        await rig.add("a", "b")
        clients[0].crash()
        (error,) = await rig.errors()
        assert error.request_id == "a"
        assert rig.pools[0].live_replica_ids() == [1]
        assert rig.known == {"b"}
        clients[1].emit(text_output("b", "done", finished=True))
        assert [output.request_id for output in await rig.outputs()] == ["b"]
        assert is_alive(rig)


async def test_the_next_stage_dies_while_the_first_still_works() -> None:
    first, second = FakeStageClient(), FakeStageClient()
    rig = Rig([[first], [second]])
    async with running(rig):
        await rig.add("a")
        second.crash()
        await settle()
        assert rig.known == {"a"}, "it never entered the dead stage"
        first.emit(text_output("a", "hello", finished=True))
        (error,) = await rig.errors()
        assert (error.fatal, error.request_id, error.stage_id) == (True, "a", 1)
        assert error.error == "Stage-1 has no live replica"
        assert rig.known == set()
        assert is_alive(rig)


async def test_a_request_into_a_dead_entry_stage_is_never_registered() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        client.crash()
        await rig.add("a")
        (error,) = await rig.errors()
        assert (error.fatal, error.request_id, error.stage_id) == (True, "a", 0)
        assert error.error == "Stage-0 has no live replica"
        assert rig.orchestrator.num_running == 0
        assert client.added == []


@pytest.mark.parametrize("kind", [StageKind.DIFFUSION, StageKind.ONE_SHOT])
async def test_a_replica_of_our_own_engines_dies_on_poll(kind: StageKind) -> None:
    client = FakeStageClient(kind=kind)
    rig = Rig([[client]], chain_pipeline(1))
    async with running(rig):
        await rig.add("a")
        client.crash("worker was killed")
        (error,) = await rig.errors()
        assert error.fatal
        assert "worker was killed" in error.error
        assert rig.pools[0].live_replica_ids() == []
        assert is_alive(rig)


async def test_a_prewarm_that_finds_no_replica_names_its_own_stage() -> None:
    clients = [FakeStageClient() for _ in range(3)]
    clients[2].add_error = StageUnavailableError("stage 2 has no live replicas")
    rig = Rig([[client] for client in clients], chain_pipeline(3, streams=True))
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        (error,) = await rig.errors()
        assert error.stage_id == 2
        assert "Stage-2" in error.error
        assert clients[1].added_ids == ["a"]
        assert clients[0].abort_calls == [["a"]]
        assert clients[1].abort_calls == [["a"]]
        assert rig.known == set()


async def test_a_stage_of_the_route_that_is_dead_fails_the_request_before_anything_runs() -> None:
    clients = [FakeStageClient() for _ in range(3)]
    rig = Rig([[client] for client in clients], chain_pipeline(3, streams=True))
    async with running(rig):
        clients[2].crash()
        await rig.add("a", plan=rig.plan(AUDIO))
        (error,) = await rig.errors()
        assert (error.stage_id, error.error) == (2, "Stage-2 has no live replica")
        assert clients[0].added == []
        await rig.add("b", plan=rig.plan(TEXT))
        assert clients[0].added_ids == ["b"], "text does not need the dead voice"


async def test_handling_a_death_with_a_survivor() -> None:
    rig, clients = one_stage(2)
    register(rig, "dead", bound=0)
    register(rig, "alive", bound=1)
    register(rig, "unplaced")
    await rig.orchestrator._handle_dead_replica(0, 0, EngineDeadError("gone"))
    assert [(error.request_id, error.stage_id) for error in await rig.errors()] == [("dead", 0)]
    assert clients[0].shutdown_calls == 1
    assert clients[1].shutdown_calls == 0
    assert rig.pools[0].get_bound_replica_id("dead") is None
    assert rig.pools[0].get_bound_replica_id("alive") == 1
    assert rig.known == {"alive", "unplaced"}


async def test_handling_the_death_of_the_last_replica() -> None:
    rig, _ = one_stage()
    register(rig, "bound", bound=0)
    register(rig, "unbound")
    register(rig, "elsewhere", entered=None)
    await rig.orchestrator._handle_dead_replica(0, 0, EngineDeadError("gone"))
    assert {error.request_id for error in await rig.errors()} == {"bound", "unbound"}
    assert rig.known == {"elsewhere"}


async def test_a_death_is_handled_once() -> None:
    rig, clients = one_stage(2)
    register(rig, "a", bound=0)
    for _ in range(2):
        await rig.orchestrator._handle_dead_replica(0, 0, EngineDeadError("gone"))
    assert len(await rig.errors()) == 1
    assert clients[0].shutdown_calls == 1


async def test_failing_a_registered_request() -> None:
    rig, (client,) = one_stage()
    register(rig, "a", bound=0)
    await rig.orchestrator._fail_request_dead_stage("a", 0)
    (error,) = await rig.errors()
    assert error == ErrorMessage(
        "Stage-0 has no live replica", True, "a", 0, code=StageUnavailableError.code
    )
    assert rig.pools[0].get_bound_replica_id("a") is None
    assert client.abort_calls == [["a"]]
    assert rig.orchestrator.num_running == 0


async def test_failing_an_unknown_request() -> None:
    rig, (client,) = one_stage()
    await rig.orchestrator._fail_request_dead_stage("nobody", 0)
    (error,) = await rig.errors()
    assert error.request_id == "nobody"
    assert rig.known == set()
    assert client.abort_calls == []


def update(request_id: str = "a") -> UpdateRequest:
    return UpdateRequest(request_id=request_id, prompt=OmniPrompt(text="more"), params=None)


async def test_an_update_that_races_an_eviction_fails_the_request() -> None:
    rig, _ = one_stage()
    state = register(rig, "a", bound=0)
    rig.pools[0].evict_replica(0)
    await rig.orchestrator._handle_streaming_update(update())
    (error,) = await rig.errors()
    assert (error.request_id, error.error) == ("a", "Stage-0 has no live replica")
    assert state.streaming_enabled
    assert rig.known == set()


async def test_a_plain_error_of_an_update_propagates() -> None:
    rig, (client,) = one_stage()
    register(rig, "a", bound=0)
    client.add_error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        await rig.orchestrator._handle_streaming_update(update())
    assert await rig.errors() == []


async def dispatch(rig: Rig, request_id: str) -> bool:
    request = StageRequest(request_id, 0, None, None)
    return await rig.orchestrator._dispatch_or_fail_request(
        lambda: rig.pools[0].submit_initial(request),
        req_id=request_id,
        stage_id=0,
        operation="add_request",
    )


async def test_a_death_during_submit_with_a_survivor() -> None:
    rig, clients = one_stage(2)
    register(rig, "a")
    clients[0].add_error = EngineDeadError("out of memory")
    assert not await dispatch(rig, "a")
    await settle()
    (error,) = await rig.errors()
    assert error.error == "Stage-0 replica 0 died: out of memory"
    assert "no live replica" not in error.error
    assert [client.shutdown_calls for client in clients] == [1, 0]
    assert [rig.pools[0].select_replica_id() for _ in range(3)] == [1, 1, 1]


async def test_a_death_during_submit_of_the_only_replica() -> None:
    rig, (client,) = one_stage()
    register(rig, "a")
    client.add_error = EngineDeadError("out of memory")
    assert not await dispatch(rig, "a")
    (error,) = await rig.errors()
    assert error.error == "Stage-0 has no live replica: out of memory"
    assert rig.pools[0].live_replica_ids() == []
    with pytest.raises(StageUnavailableError):
        rig.pools[0].select_replica_id("b")


async def test_selection_inside_the_dispatch_is_guarded_too() -> None:
    rig, _ = one_stage()
    register(rig, "a")
    rig.pools[0].evict_replica(0)
    assert not await dispatch(rig, "a")
    (error,) = await rig.errors()
    assert error.error == "Stage-0 has no live replica"


async def test_a_dispatch_that_cannot_serve_the_request_says_why() -> None:
    rig, (client,) = one_stage()
    register(rig, "a")
    client.add_error = BadRequestError("the prompt is too long", field="prompt")
    assert not await dispatch(rig, "a")
    (error,) = await rig.errors()
    raised = error.to_error()
    assert isinstance(raised, BadRequestError)
    assert (str(raised), raised.field) == ("the prompt is too long", "prompt")
    assert rig.pools[0].live_replica_ids() == [0]


async def test_a_dispatch_that_meets_a_bug_propagates() -> None:
    rig, (client,) = one_stage()
    register(rig, "a")
    client.add_error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        await dispatch(rig, "a")


async def test_a_replica_that_dies_while_it_is_given_a_request_fails_it_once() -> None:
    rig, (client, _) = one_stage(2)
    client.add_gate = asyncio.Event()
    async with running(rig):
        await rig.add("a")
        client.crash()
        await settle()
        client.add_gate.set()
        assert [error.request_id for error in await rig.errors()] == ["a"]
        assert rig.known == set()


async def test_a_request_released_while_it_is_submitted_is_aborted_on_the_replica() -> None:
    rig, (client,) = one_stage()
    client.add_gate = asyncio.Event()
    async with running(rig):
        rig.inbox.put(rig.request("a", timeout_s=0.0))
        await settle()
        assert [error.request_id for error in await rig.errors()] == ["a"]
        assert client.abort_calls == [["a"]], "the replica does not know it yet"
        client.add_gate.set()
        await settle()
        assert client.added_ids == ["a"]
        assert client.abort_calls == [["a"], ["a"]]
        assert rig.pools[0].get_bound_replica_id("a") is None


async def test_a_bug_met_while_one_request_is_added_fails_only_that_request() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        client.add_error = RuntimeError("a bug")
        await rig.add("a")
        client.add_error = None
        await rig.add("b")
        (error,) = await rig.errors()
        assert (error.request_id, error.code) == ("a", RequestFailedError.code)
        assert "a bug" in error.error
        assert rig.known == {"b"}


async def test_a_replica_that_cannot_be_sent_a_request_refuses_it() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        client.add_error = BadRequestError("a number is out of range", field="extra_args")
        await rig.add("a")
        (error,) = await rig.errors()
        assert (error.code, error.field) == (BadRequestError.code, "extra_args")
        assert rig.known == set()


async def test_a_failed_output_fails_its_request_alone() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        await rig.add("a", "b")
        client.emit(failure_output("a", "NaN in logits"), text_output("b", "fine", finished=True))
        (error,) = await rig.errors()
        assert (error.request_id, error.error, error.stage_id) == ("a", "NaN in logits", 0)
        assert [output.request_id for output in await rig.outputs()] == ["b"]
        assert rig.known == set()


async def test_a_bridge_that_refuses_fails_its_request_with_its_error() -> None:
    def refuse(*_: object) -> OmniPrompt:
        raise BadRequestError("the audio has no words", field="messages")

    clients = [FakeStageClient(), FakeStageClient()]
    rig = Rig([[c] for c in clients], bridges={"tests.fakes:join_texts": refuse})
    async with running(rig):
        await rig.add("a")
        clients[0].emit(text_output("a", "x", finished=True))
        (error,) = await rig.errors()
        assert (error.code, error.field) == (BadRequestError.code, "messages")
        assert clients[1].added == []


async def test_a_bridge_with_a_bug_fails_its_request_alone() -> None:
    def fail(*_: object) -> OmniPrompt:
        raise KeyError("transcript")

    clients = [FakeStageClient(), FakeStageClient()]
    rig = Rig([[c] for c in clients], bridges={"tests.fakes:join_texts": fail})
    async with running(rig):
        await rig.add("a", "b")
        clients[0].emit(text_output("a", "x", finished=True))
        (error,) = await rig.errors()
        assert (error.request_id, error.code) == ("a", RequestFailedError.code)
        assert "KeyError" in error.error
        assert rig.known == {"b"}
        assert is_alive(rig)


async def test_an_escaped_death_is_a_teardown_that_tells_everybody() -> None:
    rig, (client,) = one_stage()

    async def escape(*_: object) -> None:
        raise EngineDeadError("post-processing lost its engine")

    rig.orchestrator._handle_processed_outputs = escape  # type: ignore[method-assign]
    run = asyncio.create_task(rig.orchestrator.run())
    await rig.add("a")
    client.emit(text_output("a", "x"))
    await run
    (error,) = await rig.errors()
    assert (error.fatal, error.request_id, error.stage_id) == (True, None, None)
    assert "post-processing lost its engine" in error.error
    rpc = rig.rpc_queue.sync_q.get_nowait()
    assert isinstance(rpc, ErrorMessage)
    assert rpc.fatal
    assert "post-processing lost its engine" in rpc.error
    assert client.shutdown_calls == 1


async def test_a_bug_while_outputs_are_read_is_told_and_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, (client,) = one_stage()
    run = asyncio.create_task(rig.orchestrator.run())
    await rig.add("a")
    client.fail(RuntimeError("cannot decode"))
    with pytest.raises(BaseExceptionGroup):
        await run
    assert "stage=0 replica=0" in caplog.text
    assert [(error.fatal, error.request_id) for error in await rig.errors()] == [(True, None)]


async def test_an_error_while_stopping_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    rig, (client,) = one_stage()
    rig.orchestrator._shutdown_event.set()
    client.fail(RuntimeError("socket closed"))
    assert await rig.orchestrator._next_outputs(0, 0, client) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineDeadError(), ENGINE_DIED),
        (EngineDeadError("voice/0 was killed"), "voice/0 was killed"),
    ],
)
def test_a_death_is_told_in_the_replicas_own_words(error: EngineDeadError, text: str) -> None:
    assert dead_text(error) == text


async def test_killing_the_voice_leaves_text_running() -> None:
    pipeline = voice_pipeline()
    asr, thinker, voice = FakeStageClient(), FakeStageClient(), FakeStageClient(speaks())
    rig = Rig([[asr], [thinker], [voice]], pipeline)
    voice.script = None
    async with running(rig):
        await rig.add("spoken", plan=rig.plan())
        await rig.add("text", plan=rig.plan(TEXT))
        voice.emit(audio_output("spoken"))
        voice.crash("voice/0 died")
        (error,) = await rig.errors()
        assert (error.request_id, error.stage_id) == ("spoken", 2)
        assert thinker.abort_calls == [["spoken"]]
        thinker.emit(text_output("text", "still here", finished=True))
        assert (await rig.outputs())[-1].request_id == "text"


async def test_a_session_is_closed_with_its_failed_request() -> None:
    rig, (client, _) = one_stage(2)
    async with running(rig):
        rig.inbox.put(rig.request("a", session_id="call-1"))
        await settle()
        session = rig.orchestrator._sessions.get("call-1")
        assert session is not None
        assert session.replica_by_stage == {0: 0}
        client.crash()
        assert [error.request_id for error in await rig.errors()] == ["a"]
        assert rig.orchestrator._sessions.get("call-1") is None
        rig.inbox.put(rig.request("b", session_id="call-1"))
        await settle()
        assert rig.known == {"b"}, "the session's name is free again"


async def test_a_session_cannot_be_opened_twice() -> None:
    rig, _ = one_stage()
    async with running(rig):
        rig.inbox.put(rig.request("a", session_id="call-1"))
        rig.inbox.put(rig.request("b", session_id="call-1"))
        (error,) = await rig.errors()
        assert (error.request_id, error.field) == ("b", "session_id")
        assert rig.known == {"a"}


def test_the_orchestrator_shows_its_pools() -> None:
    rig, _ = one_stage(2)
    assert isinstance(rig.orchestrator, Orchestrator)
    assert repr(rig.orchestrator) == (
        "<Orchestrator [<StagePool s0 [0 live, 1 live] bound=0>] requests=0>"
    )


async def test_a_spoken_answer_survives_a_restart_of_its_slot() -> None:
    rig, (client,) = one_stage()
    async with running(rig):
        client.crash()
        await settle()
        again = FakeStageClient(says("back"))
        rig.orchestrator.attach_replica(0, 0, again)
        await rig.add("a")
        assert [output.request_id for output in await rig.outputs()] == ["a"]
