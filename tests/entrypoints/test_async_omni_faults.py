"""What goes wrong in a request ends it cleanly, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.entrypoints.voice_rig import DELTA, Voice, collect, samples_of, text_of, voice
from tests.fakes import (
    eventually,
    failure_output,
    says,
    speaks,
    text_output,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineStoppedError,
    OverloadedError,
    ReplicaDiedError,
    RequestFailedError,
    StageUnavailableError,
    UnsupportedModalityError,
)
from vllm_omni.inputs.speech import SpeechParams


async def test_leaving_the_generator_aborts_everywhere() -> None:
    async with voice() as stages:
        stages.thinker.script = lambda request: [text_output(request.request_id, "It ")]
        stages.voice.script = None
        async with aclosing(stages.omni.generate("hi", DELTA)) as outputs:
            async for output in outputs:
                assert output.text == "It "
                break
        await eventually(lambda: bool(stages.thinker.abort_calls and stages.voice.abort_calls))
        await eventually(lambda: stages.is_clean)


async def test_cancelling_the_reader_aborts_everywhere() -> None:
    async with voice() as stages:
        stages.thinker.script = stages.voice.script = None
        reader = asyncio.create_task(collect(stages.omni.generate("hi", DELTA)))
        await eventually(lambda: bool(stages.voice.added))
        reader.cancel()
        await asyncio.wait([reader])
        await eventually(lambda: bool(stages.thinker.abort_calls and stages.voice.abort_calls))
        await eventually(lambda: stages.is_clean)


async def test_cancelling_during_preparation_leaves_nothing() -> None:
    async with voice() as stages:
        stages.preparers["thinker"].gate = asyncio.Event()
        reader = asyncio.create_task(collect(stages.omni.generate("hi", DELTA)))
        await eventually(lambda: bool(stages.preparers["thinker"].prepared))
        reader.cancel()
        await asyncio.wait([reader])
        assert stages.is_clean
        assert stages.thinker.added == []


async def test_abort_by_the_callers_id_ends_the_generator() -> None:
    async with voice() as stages:
        stages.thinker.script = None
        reader = asyncio.create_task(collect(stages.omni.generate("hi", DELTA, "mine")))
        await eventually(lambda: bool(stages.thinker.added))
        await stages.omni.abort(["unknown", "mine"])
        with pytest.raises(RequestFailedError, match="aborted"):
            await reader
        await eventually(lambda: bool(stages.thinker.abort_calls))
        await eventually(lambda: stages.is_clean)


async def test_the_same_id_twice_at_once_is_served_twice() -> None:
    async with voice() as stages:
        both = await asyncio.gather(
            *(collect(stages.omni.generate("hi", DELTA, "same")) for _ in range(2))
        )
        assert [text_of(outputs) for outputs in both] == ["It is a test."] * 2
        await eventually(lambda: stages.is_clean)


async def test_overload_is_refused_before_anything_is_prepared() -> None:
    async with voice(limits=ServerLimits(max_in_flight=2)) as stages:
        stages.thinker.script = None
        readers = [
            asyncio.create_task(collect(stages.omni.generate("hi", DELTA))) for _ in range(2)
        ]
        await eventually(lambda: len(stages.thinker.added) == 2)
        with pytest.raises(OverloadedError, match="max_in_flight=2"):
            stages.omni.check_admission()
        with pytest.raises(OverloadedError):
            await collect(stages.omni.generate("hi", DELTA))
        assert len(stages.preparers["thinker"].prepared) == 2
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        stages.omni.check_admission()
        with pytest.raises(BadRequestError, match="n=3 choices") as raised:
            stages.omni.check_admission(n=3)
        assert raised.value.field == "n"
        stages.thinker.script = says("free again")
        assert await collect(stages.omni.generate("hi", DELTA))


async def test_a_bad_request_is_refused_by_the_entry_stages_preparer() -> None:
    async with voice() as stages:
        stages.preparers["thinker"].error = BadRequestError("too long", field="messages")
        with pytest.raises(BadRequestError, match="too long"):
            await collect(stages.omni.generate("hi", DELTA))
        assert stages.is_clean
        assert stages.thinker.added == []


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "field"),
    [
        ("hi", {"output_modalities": ["smell"]}, UnsupportedModalityError, "modalities"),
        ("hi", {"output_modalities": ["video"]}, UnsupportedModalityError, "modalities"),
        (42, {}, BadRequestError, "prompt"),
        ("hi <|audio|>", {}, BadRequestError, "prompt"),
        ("hi", {"sampling_params_list": [None]}, BadRequestError, "sampling_params_list"),
        ("hi", {"sampling_params": SpeechParams()}, BadRequestError, "sampling_params"),
        (
            {"messages": [{"role": "user", "content": "say <|audio|>"}]},
            {},
            BadRequestError,
            "messages",
        ),
    ],
)
async def test_what_cannot_be_served_names_the_field(
    prompt: object, kwargs: dict[str, Any], error: type[BadRequestError], field: str
) -> None:
    async with voice() as stages:
        with pytest.raises(error) as raised:
            await collect(stages.omni.generate(prompt, **kwargs))
        assert raised.value.field == field
        assert stages.is_clean


async def test_a_failed_stage_raises_its_error() -> None:
    async with voice() as stages:
        stages.thinker.script = lambda r: [
            failure_output(r.request_id, "bad voice", "invalid_request")
        ]
        with pytest.raises(BadRequestError, match="bad voice"):
            await collect(stages.omni.generate("hi", DELTA))
        await eventually(lambda: stages.is_clean)


async def test_a_dead_stage_fails_only_the_requests_that_need_it() -> None:
    async with voice() as stages:
        stages.voice.script = None
        reader = asyncio.create_task(collect(stages.omni.generate("hi", DELTA)))
        await eventually(lambda: bool(stages.voice.added))
        stages.voice.crash("voice/0 was killed")
        with pytest.raises(ReplicaDiedError, match="voice/0 was killed"):
            await reader
        outputs = await collect(stages.omni.generate("hi", DELTA, output_modalities=["text"]))
        assert text_of(outputs) == "It is a test."
        with pytest.raises(StageUnavailableError, match="Stage-2 has no live replica"):
            await collect(stages.omni.generate("hi", DELTA))
        assert stages.omni.is_running
        assert not stages.omni.errored
        with pytest.raises(EngineDeadError, match="Stage-2 has no live replica"):
            await stages.omni.check_health()
        assert stages.omni.dead_stages() == ["voice"]
        await eventually(lambda: stages.is_clean)


async def test_the_deadline_names_the_stage() -> None:
    async with voice() as stages:
        stages.thinker.script = None
        with pytest.raises(DeadlineExceededError, match="'thinker' was awaited for its first"):
            await collect(stages.omni.generate("hi", DELTA, deadline_s=0.05))
        await eventually(lambda: bool(stages.thinker.abort_calls))
        await eventually(lambda: stages.is_clean)


async def test_the_deadline_holds_while_the_prompt_is_prepared() -> None:
    async with voice() as stages:
        stages.preparers["thinker"].gate = asyncio.Event()
        with pytest.raises(DeadlineExceededError, match="its prompt was being prepared"):
            await collect(stages.omni.generate("hi", DELTA, deadline_s=0.05))
        assert stages.is_clean


async def test_a_slow_client_merges_and_loses_nothing() -> None:
    async with voice() as stages:
        stages.thinker.script = None
        stages.voice.script = None
        stream = stages.omni.generate("hi", DELTA)
        async with aclosing(stream) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await eventually(lambda: bool(stages.voice.added))
            request_id = stages.thinker.added[0].request_id
            stages.thinker.emit(text_output(request_id, "0 "))
            received = [await first]
            for i in range(1, 2000):
                stages.thinker.emit(text_output(request_id, f"{i} ", finished=i == 1999))
            for output in speaks(500, 10)(stages.voice.added[0]):
                stages.voice.emit(output)
            await eventually(lambda: not len(stages.omni._router))
            received += [output async for output in outputs]
        assert text_of(received) == "".join(f"{i} " for i in range(2000))
        assert samples_of(received) == 5000
        assert len(received) <= 4, "what was not read was merged"


async def test_the_death_of_the_orchestrator_ends_every_request_at_once() -> None:
    stages = Voice()
    stages.thinker.script = None
    readers = [asyncio.create_task(collect(stages.omni.generate("hi", DELTA))) for _ in range(3)]
    await eventually(lambda: len(stages.thinker.added) == 3)
    call = asyncio.create_task(stages.omni.call_stages("hang"))
    hanging = asyncio.Event()
    stages.thinker.utility = lambda *_: hanging.wait()
    stages.thinker.fail(RuntimeError("a bug"))
    for reader in readers:
        with pytest.raises(EngineStoppedError, match="a bug"):
            await reader
    with pytest.raises(EngineStoppedError):
        await call
    await eventually(lambda: stages.omni.errored)
    assert not stages.omni.is_running
    assert "a bug" in str(stages.omni.dead_error)
    with pytest.raises(EngineDeadError, match="Orchestrator process is not alive"):
        await stages.omni.check_health()
    with pytest.raises(EngineStoppedError):
        stages.omni.check_admission()
    with pytest.raises(EngineStoppedError):
        await collect(stages.omni.generate("hi", DELTA))
    await stages.omni.aclose()


async def test_closing_fails_what_still_runs() -> None:
    stages = Voice()
    stages.thinker.script = None
    reader = asyncio.create_task(collect(stages.omni.generate("hi", DELTA)))
    await eventually(lambda: bool(stages.thinker.added))
    await stages.omni.aclose()
    with pytest.raises(EngineStoppedError):
        await reader
    assert [c.shutdown_calls for c in (stages.asr, stages.thinker, stages.voice)] == [1, 1, 1]
    assert [preparer.shutdown_calls for preparer in stages.preparers.values()] == [1, 1, 1]
    await stages.omni.aclose()


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    async with voice() as stages:
        with pytest.raises(BadRequestError, match="a deadline is a finite time") as refusal:
            await collect(stages.omni.generate("hi", DELTA, deadline_s=deadline_s))

        assert refusal.value.field == "deadline_s"
        assert stages.thinker.added == []


async def test_an_engine_that_drains_takes_nothing_new_and_finishes_what_runs() -> None:
    async with voice() as stages:
        stages.thinker.script = None
        running = asyncio.create_task(
            collect(stages.omni.generate("hi", DELTA, output_modalities=["text"]))
        )
        await eventually(lambda: bool(stages.thinker.added))
        closing = asyncio.create_task(stages.omni.aclose(drain_s=30.0))
        await eventually(lambda: stages.omni.engine.is_stopping)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await collect(stages.omni.generate("new", DELTA))
        request_id = stages.thinker.added[0].request_id
        stages.thinker.emit(text_output(request_id, "late", finished=True))

        assert text_of(await running) == "late"
        await asyncio.wait_for(closing, 5)
