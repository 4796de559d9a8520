from __future__ import annotations

import asyncio

import pytest

from tests.fakes import audio_output, settle, text_output
from vllm_omni.engine.mailbox import Outbox
from vllm_omni.engine.queue_messages import ClientOutput, ErrorMessage
from vllm_omni.entrypoints.output_collector import OutputCollector, OutputRouter
from vllm_omni.errors import BadRequestError, EngineStoppedError, RequestFailedError
from vllm_omni.outputs.request_output import StageTimings

TIMINGS = {"s0": StageTimings(submitted_s=0.0)}


def text(words: str, *, is_last: bool = False, request_id: str = "a") -> ClientOutput:
    return ClientOutput(
        request_id, 0, text_output(request_id, words), True, TIMINGS if is_last else None
    )


def audio(*, is_last: bool = False) -> ClientOutput:
    return ClientOutput("a", 2, audio_output("a", 10), True, TIMINGS if is_last else None)


def test_outputs_of_one_stage_merge_until_they_are_taken() -> None:
    collector = OutputCollector(1)
    collector.put(0, text("one "))
    collector.put(0, text("two"))
    taken = collector.take()
    assert taken is not None
    assert taken[1].output.text.outputs[0].text == "one two"
    assert collector.take() is None


def test_choices_do_not_merge_with_each_other() -> None:
    collector = OutputCollector(2)
    collector.put(0, text("zero"))
    collector.put(1, text("one"))
    assert [taken and taken[0] for taken in (collector.take(), collector.take())] == [0, 1]


def test_the_last_output_is_taken_last() -> None:
    collector = OutputCollector(1)
    collector.put(0, audio())
    collector.put(0, text("words"))
    collector.put(0, audio(is_last=True))
    first, second = collector.take(), collector.take()
    assert first is not None
    assert second is not None
    assert first[1].stage_id == 0
    assert second[1].output.audio is not None
    assert second[1].output.audio.num_samples == 20
    assert collector.num_open == 0


def test_an_error_stands_before_what_was_not_taken() -> None:
    collector = OutputCollector(1)
    collector.put(0, text("words"))
    collector.fail(RequestFailedError("broken"))
    with pytest.raises(RequestFailedError, match="broken"):
        collector.take()


async def test_a_waiting_reader_is_woken() -> None:
    collector = OutputCollector(1)
    reader = asyncio.create_task(collector.wait())
    await settle()
    assert not reader.done()
    collector.put(0, text("x"))
    collector.put(0, text("y"))
    await reader
    await collector.wait()


async def test_a_cancelled_reader_leaves_the_collector_usable() -> None:
    collector = OutputCollector(1)
    reader = asyncio.create_task(collector.wait())
    await settle()
    reader.cancel()
    await asyncio.wait([reader])
    collector.put(0, text("x"))
    await collector.wait()
    assert collector.take() is not None


async def test_errors_go_to_their_request_and_strangers_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = Outbox(8)
    router = OutputRouter(outbox)
    router.start()
    mine, other = OutputCollector(1), OutputCollector(1)
    router.open(["a"], mine)
    router.open(["b"], other)
    outbox.put([ErrorMessage("who?", True, "stranger"), ErrorMessage("ignored")])
    outbox.put([ErrorMessage("bad", False, "a", code=BadRequestError.code, field="messages")])
    outbox.put([text("fine", request_id="b")])
    await settle()
    with pytest.raises(BadRequestError, match="bad") as raised:
        mine.take()
    assert raised.value.field == "messages"
    assert other.take() is not None
    assert "stranger" in caplog.text
    assert router.dead_error is None
    await router.stop()


async def test_a_fatal_error_without_a_request_ends_everything() -> None:
    outbox = Outbox(8)
    router = OutputRouter(outbox)
    router.start()
    collectors = [OutputCollector(1) for _ in range(3)]
    for i, collector in enumerate(collectors):
        router.open([f"r{i}"], collector)
    outbox.put([ErrorMessage("the orchestrator died", True)])
    await settle()
    for collector in collectors:
        with pytest.raises(EngineStoppedError, match="the orchestrator died"):
            collector.take()
    with pytest.raises(EngineStoppedError, match="the orchestrator died"):
        router.open(["late"], OutputCollector(1))
    assert len(router) == 0
    await router.stop()


async def test_an_outbox_that_closes_ends_everything() -> None:
    outbox = Outbox(8)
    router = OutputRouter(outbox)
    router.start()
    collector = OutputCollector(1)
    router.open(["a"], collector)
    outbox.close()
    await settle()
    with pytest.raises(EngineStoppedError):
        collector.take()


async def test_closing_returns_what_had_not_ended() -> None:
    outbox = Outbox(8)
    router = OutputRouter(outbox)
    router.start()
    collector = OutputCollector(2)
    router.open(["a", "b"], collector)
    outbox.put([text("x", is_last=True, request_id="a")])
    await settle()
    assert router.close(["a", "b"]) == ["b"]
    outbox.put([text("late", request_id="b")])
    await settle()
    await router.stop()
