"""Requests on their way through the stages, over fake replicas on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from tests.engine.rig import AUDIO, TEXT, Rig, is_alive, running
from tests.fakes import (
    FakeStageClient,
    audio_output,
    chain_pipeline,
    end_output,
    says,
    settle,
    speaks,
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
from vllm_omni.engine.graph import plan_of
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.queue_messages import RpcCall, RpcResult, UpdateRequest
from vllm_omni.errors import DeadlineExceededError, EngineStoppedError
from vllm_omni.inputs.prompt import OmniPrompt


def clients_of(num_stages: int) -> list[FakeStageClient]:
    return [FakeStageClient(stage_id=i, data_address=f"fake://{i}") for i in range(num_stages)]


def rig_of(clients: Sequence[FakeStageClient], *, streams: bool = False) -> Rig:
    return Rig([[client] for client in clients], chain_pipeline(len(clients), streams=streams))


async def test_a_request_goes_through_its_stages_in_order() -> None:
    clients = clients_of(3)
    rig = rig_of(clients)
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        assert [client.added_ids for client in clients] == [["a"], [], []]
        clients[0].emit(text_output("a", "hello"), text_output("a", "world", finished=True))
        await settle()
        assert [client.added_ids for client in clients] == [["a"], ["a"], []]
        assert clients[1].added[0].prompt == OmniPrompt(text="hello world")
        clients[1].emit(text_output("a", "again", finished=True))
        await settle()
        clients[2].emit(audio_output("a", finished=True))
        (output,) = await rig.outputs()
        assert output.stage_id == 2
        assert output.timings is not None
        assert list(output.timings) == ["s0", "s1", "s2"]
        assert rig.known == set()
        assert [pool.get_bound_replica_id("a") for pool in rig.pools] == [None] * 3
        assert [client.abort_calls for client in clients] == [[], [], []]


async def test_only_the_stages_a_request_needs_run() -> None:
    clients = clients_of(3)
    rig = rig_of(clients)
    async with running(rig):
        await rig.add("a", plan=rig.plan(TEXT))
        clients[0].emit(text_output("a", "hello", finished=True))
        (output,) = await rig.outputs()
        assert output.timings is not None
        assert list(output.timings) == ["s0"]
        assert (clients[1].added, clients[2].added) == ([], [])


async def test_streaming_stages_start_with_the_request_and_know_their_streams() -> None:
    clients = clients_of(3)
    rig = rig_of(clients, streams=True)
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        first, second, third = (client.added[0] for client in clients)
        assert [(t.address, t.stream) for t in first.targets] == [("fake://1", "a/s0>s1")]
        assert [(s.stream, s.stage) for s in second.sources] == [("a/s0>s1", "s0")]
        assert [(t.address, t.stream) for t in second.targets] == [("fake://2", "a/s1>s2")]
        assert [(s.stream, s.stage) for s in third.sources] == [("a/s1>s2", "s1")]
        assert (second.prompt, third.prompt) == (None, None)
        assert (first.sources, third.targets) == ((), ())


async def test_who_reads_a_stream_hears_when_its_stage_has_finished() -> None:
    clients = clients_of(3)
    rig = rig_of(clients, streams=True)
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        clients[0].emit(text_output("a", "hello"))
        await settle()
        assert clients[1].ended_sources == []
        clients[0].emit(text_output("a", "world", finished=True))
        await settle()
        assert clients[1].ended_sources == [("a", "a/s0>s1")]
        assert clients[2].ended_sources == []


async def test_streams_go_to_the_replica_that_was_chosen() -> None:
    voices = [FakeStageClient(data_address=f"fake://v{i}", replica_id=i) for i in range(2)]
    first = FakeStageClient()
    rig = Rig([[first], voices], chain_pipeline(2, streams=True))
    async with running(rig):
        await rig.add("a", "b", plan=rig.plan(AUDIO))
        assert [request.targets[0].address for request in first.added] == ["fake://v0", "fake://v1"]
        assert [client.added_ids for client in voices] == [["a"], ["b"]]


async def test_a_target_without_data_plane_fails_the_request() -> None:
    clients = [FakeStageClient(), FakeStageClient(data_address=None)]
    rig = rig_of(clients, streams=True)
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        (error,) = await rig.errors()
        assert error.error == "stage 's1' takes no streams"


async def test_speech_in_text_and_speech_out() -> None:
    asr, thinker, voice = clients_of(3)
    rig = Rig([[asr], [thinker], [voice]], voice_pipeline())
    plan = rig.plan(AUDIO | TEXT, frozenset({Modality.AUDIO}))
    async with running(rig):
        await rig.add("a", plan=plan)
        assert voice.added_ids == ["a"], "the voice waits for the first chunk"
        asr.emit(text_output("a", "what is"), text_output("a", "this", finished=True))
        await settle()
        assert thinker.added[0].prompt == OmniPrompt(text="what is this")
        assert thinker.added[0].targets[0].stream == "a/thinker>voice"
        thinker.emit(text_output("a", "a test", finished=True))
        voice.emit(audio_output("a", finished=True))
        text, audio = await rig.outputs()
        assert (text.stage_id, text.timings) == (1, None)
        assert audio.timings is not None
        assert list(audio.timings) == ["asr", "thinker", "voice"]


@pytest.mark.parametrize(
    ("task", "stage_id"), [(Task.SPEECH, 2), (Task.TRANSCRIPTION, 0), (Task.CHAT, 1)]
)
async def test_every_task_enters_at_its_stage(task: Task, stage_id: int) -> None:
    clients = clients_of(3)
    rig = Rig([[client] for client in clients], voice_pipeline())
    async with running(rig):
        await rig.add("a", plan=rig.plan(TEXT, task=task))
        assert [bool(client.added) for client in clients] == [i == stage_id for i in range(3)]


async def test_outputs_of_one_step_cross_as_one_batch_in_order() -> None:
    rig = rig_of(clients_of(1))
    (client,) = (rig.pools[0].client(0),)
    assert isinstance(client, FakeStageClient)
    async with running(rig):
        await rig.add("a", "b")
        client.emit(text_output("a", "1"), text_output("b", "2"), text_output("a", "3"))
        await settle()
        (batch,) = rig.outbox.take()
        assert [item.output.text.outputs[0].text for item in batch] == ["1", "2", "3"]


async def test_a_stage_that_ends_without_any_text_ends_the_request() -> None:
    clients = clients_of(2)
    rig = rig_of(clients)
    async with running(rig):
        await rig.add("a")
        clients[0].emit(end_output("a"))
        await settle()
        assert clients[1].added[0].prompt == OmniPrompt(text="")
        clients[1].emit(end_output("a"))
        (last,) = await rig.outputs()
        assert last.timings is not None
        assert last.output.audio is None
        assert rig.known == set()


async def test_a_middle_stage_that_stops_at_its_first_token_does_not_wedge_the_next() -> None:
    clients = clients_of(3)
    rig = rig_of(clients)
    clients[1].script = says("")
    clients[2].script = speaks(1, num_samples=0)
    async with running(rig):
        await rig.add("a", "b", plan=rig.plan(AUDIO))
        clients[0].emit(text_output("a", "x", finished=True), text_output("b", "y", finished=True))
        assert [output.timings is not None for output in await rig.outputs()] == [True, True]
        assert rig.known == set()


async def test_outputs_after_the_end_are_dropped() -> None:
    clients = clients_of(2)
    rig = rig_of(clients)
    async with running(rig):
        await rig.add("a")
        clients[0].emit(text_output("a", "x", finished=True), text_output("a", "late"))
        clients[0].emit(text_output("nobody", "x", finished=True))
        outputs = await rig.outputs()
        assert [output.output.text.outputs[0].text for output in outputs] == ["x"]
        assert is_alive(rig)


async def test_what_is_not_needed_any_more_is_stopped() -> None:
    clients = clients_of(2)
    rig = rig_of(clients, streams=True)
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        clients[1].emit(audio_output("a", finished=True))
        assert len(await rig.outputs()) == 1
        assert clients[0].abort_calls == [["a"]], "its end marker was lost, or it runs on"
        assert rig.known == set()


@pytest.mark.parametrize(
    ("started", "what"),
    [
        (False, "stage 's0' was awaited for its first output"),
        (True, "stage 's0' was awaited for its next output or its end"),
    ],
)
async def test_a_stage_that_never_ends_runs_into_the_deadline(started: bool, what: str) -> None:
    clients = clients_of(2)
    rig = rig_of(clients)
    if started:
        clients[0].script = lambda request: [text_output(request.request_id, "x")]
    async with running(rig):
        rig.inbox.put(rig.request("a", timeout_s=0.05))
        (error,) = await rig.next_errors()
        assert (error.code, error.stage_id) == (DeadlineExceededError.code, 0)
        assert error.error == f"deadline of 0.05 s exceeded: {what}"
        assert clients[0].abort_calls == [["a"]]
        assert rig.known == set()


async def test_a_stream_that_is_never_ended_names_the_stage_that_waits_for_it() -> None:
    clients = clients_of(2)
    rig = rig_of(clients, streams=True)
    async with running(rig):
        rig.inbox.put(rig.request("a", rig.plan(AUDIO), timeout_s=0.05))
        await settle()
        clients[0].emit(text_output("a", "all of it", finished=True))
        (error,) = await rig.next_errors()
        assert error.stage_id == 1
        assert error.error.endswith(
            "stage 's1' was awaited for its first output (fed by the stream of s0)"
        )
        assert clients[1].abort_calls == [["a"]]


async def test_an_abort_reaches_every_stage() -> None:
    clients = clients_of(3)
    rig = rig_of(clients, streams=True)
    async with running(rig):
        await rig.add("a", "b", plan=rig.plan(AUDIO))
        rig.inbox.abort(["a", "unknown"])
        await settle()
        assert [client.abort_calls for client in clients] == [[["a"]]] * 3
        assert rig.known == {"b"}
        assert await rig.errors() == []


async def test_a_request_that_is_aborted_before_it_is_read_never_starts() -> None:
    rig = rig_of(clients_of(1))
    rig.inbox.put(rig.request("a"))
    rig.inbox.abort(["a"])
    async with running(rig):
        await settle()
        client = rig.pools[0].client(0)
        assert isinstance(client, FakeStageClient)
        assert client.added == []


async def test_nothing_is_left_of_a_thousand_requests() -> None:
    clients = clients_of(3)
    for client, script in zip(clients, (says("a"), says("b"), speaks(1)), strict=True):
        client.script = script
    rig = rig_of(clients)
    async with running(rig):
        for i in range(1000):
            rig.inbox.put(rig.request(f"r{i}"))
            if i % 2:
                rig.inbox.abort([f"r{i}"])
        await rig.drain()
        assert rig.known == set()
        assert [repr(pool) for pool in rig.pools] == [
            f"<StagePool s{i} [0 live] bound=0>" for i in range(3)
        ]
        assert len(rig.orchestrator._deadlines) == 0


async def test_more_input_for_a_session_goes_to_its_replica() -> None:
    clients = clients_of(2)
    rig = rig_of(clients)
    async with running(rig):
        rig.inbox.put(rig.request("a", session_id="call"))
        await settle()
        clients[0].emit(text_output("a", "first", finished=True))
        await settle()
        rig.inbox.put(UpdateRequest(request_id="a", prompt=OmniPrompt(text="more"), params=None))
        await settle()
        assert [update.prompt for update in clients[0].updated] == [OmniPrompt(text="more")]
        clients[0].emit(text_output("a", "second", finished=True))
        await settle()
        assert [update.prompt for update in clients[1].updated] == [OmniPrompt(text="second")]
        assert rig.known == {"a"}


async def test_an_update_of_a_request_that_ended_is_ignored() -> None:
    rig = rig_of(clients_of(1))
    async with running(rig):
        rig.inbox.put(UpdateRequest(request_id="gone", prompt=None, params=None))
        assert await rig.errors() == []
        assert is_alive(rig)


async def call(rig: Rig, **kwargs: object) -> RpcResult:
    rig.inbox.put(RpcCall(call_id=7, **kwargs))  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        result = await rig.rpc_queue.async_q.get()
    assert isinstance(result, RpcResult)
    assert result.call_id == 7
    return result


async def test_a_method_is_called_in_every_live_replica() -> None:
    clients = [FakeStageClient(replica_id=i) for i in range(3)]
    for i, client in enumerate(clients):
        client.utility = lambda method, *args, i=i: f"{method}{args} on {i}"
    rig = Rig([clients], chain_pipeline(1))
    async with running(rig):
        clients[1].crash()
        await settle()
        result = await call(rig, method="reset", args=(1,))
        assert result.results == ("reset(1,) on 0", "reset(1,) on 2")


async def test_a_method_that_fails_or_does_not_return_says_so() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    def refuse(method: str) -> None:
        raise ValueError("no such adapter")

    rig = rig_of(clients_of(2))
    first, second = (pool.client(0) for pool in rig.pools)
    assert isinstance(first, FakeStageClient)
    assert isinstance(second, FakeStageClient)
    first.utility, second.utility = refuse, lambda method: hang()
    async with running(rig):
        failed = await call(rig, method="add_lora", stage_ids=(0,))
        assert failed.error == "ValueError: no such adapter"
        late = await call(rig, method="sleep", stage_ids=(1,), timeout_s=0.02)
        assert late.error == "sleep did not return within 0.02 s"
        assert is_alive(rig)


async def test_stopping_waits_for_running_requests() -> None:
    (client,) = clients_of(1)
    rig = rig_of([client])
    run = asyncio.create_task(rig.orchestrator.run())
    await rig.add("a")
    rig.orchestrator.request_shutdown(drain_s=5.0)
    await settle()
    assert not run.done()
    client.emit(text_output("a", "done", finished=True))
    await run
    assert [output.request_id for output in await rig.outputs()] == ["a"]
    assert client.shutdown_calls == 1


async def test_stopping_twice_does_not_wait_any_longer() -> None:
    rig = rig_of(clients_of(1))
    run = asyncio.create_task(rig.orchestrator.run())
    await rig.add("a")
    rig.orchestrator.request_shutdown(drain_s=600.0)
    await settle()
    rig.orchestrator.request_shutdown()
    await run
    (error,) = await rig.errors()
    assert (error.request_id, error.code) == ("a", EngineStoppedError.code)


async def test_a_slow_submit_does_not_lose_what_comes_meanwhile() -> None:
    (client,) = clients_of(1)
    client.add_gate = asyncio.Event()
    rig = rig_of([client])
    async with running(rig):
        await rig.add("a", "b")
        assert client.added == []
        client.add_gate.set()
        await settle()
        assert client.added_ids == ["a", "b"]


async def test_several_sources_are_joined_by_one_bridge() -> None:
    bridge = "tests.fakes:join_texts"
    stages = [
        StageConfig(name=name, kind=StageKind.AUTOREGRESSIVE, emits=emits)
        for name, emits in (("a", None), ("b", None), ("c", None), ("d", Modality.TEXT))
    ]
    pipeline = PipelineConfig(
        model_type="fake_diamond",
        stages=tuple(stages),
        edges=tuple(
            Edge(source=source, target=target, bridge=bridge)
            for source, target in (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
        ),
        entries={Task.CHAT: "a"},
    )
    clients = clients_of(4)
    rig = Rig([[client] for client in clients], pipeline)
    route = Route((0, 1, 2, 3), 0, frozenset({3}), pipeline.edges)
    async with running(rig):
        await rig.add("r", plan=plan_of(pipeline, route))
        clients[0].emit(text_output("r", "x", finished=True))
        await settle()
        assert (clients[1].added_ids, clients[2].added_ids) == (["r"], ["r"])
        clients[2].emit(text_output("r", "from c", finished=True))
        await settle()
        assert clients[3].added == []
        clients[1].emit(text_output("r", "from b", finished=True))
        await settle()
        assert clients[3].added[0].prompt == OmniPrompt(text="from b from c")


async def test_a_bridge_sees_one_output_for_each_prompt_of_the_source() -> None:
    seen: list[Sequence[StageOutput]] = []

    def bridge(prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]) -> OmniPrompt:
        seen.append(upstream["s0"])
        return prompt

    clients = clients_of(2)
    rig = Rig([[c] for c in clients], bridges={"tests.fakes:join_texts": bridge})
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        clients[0].emit(text_output("a", "one"))
        clients[0].emit(text_output("a", "two", finished=True))
        await settle()
    assert [[output.text.outputs[0].text for output in outputs] for outputs in seen] == [
        ["one", "two"]
    ]


async def test_text_that_the_client_also_reads_is_joined_for_the_bridge() -> None:
    clients = clients_of(2)
    rig = rig_of(clients)
    requests: list[StageRequest] = clients[1].added
    async with running(rig):
        await rig.add("a")
        clients[0].emit(text_output("a", "one "), text_output("a", "two", finished=True))
        texts = [output.output.text.outputs[0].text for output in await rig.outputs()]
        assert texts == ["one ", "two"], "what the client gets is not touched"
        assert requests[0].prompt == OmniPrompt(text="one two")
