from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fakes import audio_output, next_batches, settle, text_output
from vllm_omni.engine.mailbox import Inbox, Outbox
from vllm_omni.engine.queue_messages import (
    ClientOutput,
    ErrorMessage,
    RpcCall,
    UpdateRequest,
)
from vllm_omni.errors import EngineStoppedError, OverloadedError
from vllm_omni.outputs.request_output import StageTimings


def update(request_id: str) -> UpdateRequest:
    return UpdateRequest(request_id=request_id, prompt=None, params=None)


def delta(
    request_id: str, text: str, *, is_last: bool = False, is_delta: bool = True
) -> ClientOutput:
    timings = {"s0": StageTimings(submitted_s=0.0)} if is_last else None
    return ClientOutput(
        request_id, 0, text_output(request_id, text, finished=is_last), is_delta, timings
    )


def texts(item: ClientOutput | ErrorMessage) -> str:
    assert isinstance(item, ClientOutput)
    text: str = item.output.text.outputs[0].text
    return text


async def test_messages_arrive_in_order_and_together() -> None:
    inbox = Inbox(10)
    for request_id in "abc":
        inbox.put(update(request_id))
    messages, aborts = await inbox.take()
    assert [message.request_id for message in messages if not isinstance(message, RpcCall)] == [
        *"abc"
    ]
    assert aborts == set()


async def test_a_full_inbox_refuses_work_but_takes_aborts() -> None:
    inbox = Inbox(2)
    inbox.put(update("a"))
    inbox.put(update("b"))
    with pytest.raises(OverloadedError):
        inbox.put(update("c"))
    inbox.abort(["a"])
    inbox.abort(["b"])
    messages, aborts = await inbox.take()
    assert len(messages) == 2
    assert aborts == {"a", "b"}


async def test_an_abort_wakes_an_idle_reader() -> None:
    inbox = Inbox(2)
    taken = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.abort(["a"])
    async with asyncio.timeout(5):
        assert await taken == ([], {"a"})


async def test_a_closed_inbox_says_that_the_engine_has_stopped() -> None:
    inbox = Inbox(2)
    inbox.close()
    with pytest.raises(EngineStoppedError):
        inbox.put(update("a"))
    inbox.abort(["a"])


def test_a_slow_reader_gets_merged_outputs_in_order() -> None:
    outbox = Outbox(2)
    for text in ("one ", "two ", "three ", "four"):
        outbox.put([delta("a", text), delta("b", text, is_delta=False)])
    outbox.put([delta("a", "!", is_last=True)])
    outbox.put([ErrorMessage("broken", True, "c")])
    batches = outbox.take()
    assert [[texts(item) for item in batch] for batch in batches[:2]] == [
        ["one ", "one "],
        ["two ", "two "],
    ]
    merged, cumulative, error = batches[2]
    assert texts(merged) == "three four!"
    assert isinstance(merged, ClientOutput)
    assert merged.timings is not None
    assert texts(cumulative) == "four"
    assert isinstance(error, ErrorMessage)
    outbox.put([delta("a", "next")])
    assert len(outbox.take()) == 1


def test_newer_outputs_never_overtake_the_overflow() -> None:
    outbox = Outbox(1)
    for text in ("one ", "two ", "three"):
        outbox.put([delta("a", text)])
    first, rest = outbox.take()
    outbox.put([delta("a", "four")])
    (last,) = outbox.take()
    assert [texts(item) for item in [*first, *rest, *last]] == ["one ", "two three", "four"]


def test_merged_audio_loses_no_sample() -> None:
    outbox = Outbox(1)
    for _ in range(4):
        outbox.put([ClientOutput("a", 2, audio_output("a", 100), True)])
    samples = 0
    for batch in outbox.take():
        for item in batch:
            assert isinstance(item, ClientOutput)
            assert item.output.audio is not None
            samples += item.output.audio.num_samples
    assert samples == 400


def test_what_was_put_before_the_end_is_read_and_then_it_ends() -> None:
    outbox = Outbox(2)
    outbox.put([delta("a", "last")])
    outbox.close()
    outbox.put([delta("a", "after")])
    assert [texts(item) for batch in outbox.take() for item in batch] == ["last"]
    with pytest.raises(EngineStoppedError):
        outbox.take()


async def test_a_listener_is_called_once_until_it_has_taken() -> None:
    outbox, calls = Outbox(8), []
    outbox.put([delta("a", "before anybody listened")])
    outbox.listen(lambda: calls.append("heard"))
    outbox.put([delta("a", "more")])
    await settle()
    assert calls == ["heard"]

    assert len(outbox.take()) == 2
    await settle()
    assert calls == ["heard"]

    outbox.put([delta("a", "again")])
    await settle()
    assert calls == ["heard"] * 2


async def test_a_listener_hears_of_the_end_also_behind_outputs() -> None:
    outbox, heard = Outbox(8), []

    def read() -> None:
        try:
            heard.extend(texts(item) for batch in outbox.take() for item in batch)
        except EngineStoppedError:
            heard.append("the end")

    outbox.listen(read)
    outbox.put([delta("a", "last")])
    outbox.close()
    await settle()
    assert heard == ["last", "the end"]


async def test_who_ignores_it_is_called_no_more() -> None:
    outbox, calls = Outbox(8), []
    outbox.listen(lambda: calls.append("heard"))
    outbox.ignore()
    outbox.put([delta("a", "x")])
    outbox.close()
    await settle()
    assert calls == []


def test_a_writer_outlives_its_listener_s_loop() -> None:
    outbox = Outbox(1)

    async def listen() -> None:
        outbox.listen(lambda: None)

    asyncio.run(listen())
    outbox.put([delta("a", "nobody hears it")])
    outbox.close()


async def test_nothing_is_lost_between_two_threads() -> None:
    outbox = Outbox(4)
    num_tokens = 20_000

    def write() -> None:
        for i in range(num_tokens):
            outbox.put([delta("a", "x", is_last=i == num_tokens - 1)])

    writer = threading.Thread(target=write)
    writer.start()
    received, ended = 0, False
    async with asyncio.timeout(30):
        while not ended:
            for batch in await next_batches(outbox):
                for item in batch:
                    received += len(texts(item))
                    ended = isinstance(item, ClientOutput) and item.timings is not None
    writer.join()
    assert received == num_tokens
