from __future__ import annotations

import asyncio
import threading

import janus
import pytest

from tests.fakes import audio_output, text_output
from vllm_omni.engine.mailbox import Inbox, Outbox, OutputBatch
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


async def test_a_slow_reader_gets_merged_outputs_in_order() -> None:
    outbox = Outbox(2)
    for text in ("one ", "two ", "three ", "four"):
        outbox.put([delta("a", text), delta("b", text, is_delta=False)])
    outbox.put([delta("a", "!", is_last=True)])
    outbox.put([ErrorMessage("broken", True, "c")])
    batches = await outbox.take()
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
    assert len(await outbox.take()) == 1


async def test_what_is_written_while_the_queue_is_emptied_does_not_overtake_the_overflow() -> None:
    outbox = Outbox(1)
    outbox.put([delta("a", "one ")])
    outbox.put([delta("a", "two ")])
    outbox._queue.sync_q.get_nowait()  # the reader has begun to empty the queue
    outbox.put([delta("a", "three")])
    (batch,) = outbox._take_rest()
    assert [texts(item) for item in batch] == ["two three"]


async def test_merged_audio_loses_no_sample() -> None:
    outbox = Outbox(1)
    for _ in range(4):
        outbox.put([ClientOutput("a", 2, audio_output("a", 100), True)])
    samples = 0
    for batch in await outbox.take():
        for item in batch:
            assert isinstance(item, ClientOutput)
            assert item.output.audio is not None
            samples += item.output.audio.num_samples
    assert samples == 400


async def test_what_was_put_before_the_end_is_read_and_then_it_ends() -> None:
    outbox = Outbox(2)
    outbox.put([delta("a", "last")])
    outbox.close()
    outbox.put([delta("a", "after")])
    assert [texts(item) for batch in await outbox.take() for item in batch] == ["last"]
    with pytest.raises(EngineStoppedError):
        await outbox.take()


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
            for batch in await outbox.take():
                for item in batch:
                    received += len(texts(item))
                    ended = isinstance(item, ClientOutput) and item.timings is not None
    writer.join()
    assert received == num_tokens


async def test_what_is_written_after_the_last_read_does_not_come_behind_its_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox(2)
    writer = threading.Thread(
        target=lambda: [outbox.put([delta("a", word)]) for word in ("one ", "two ", "three")]
    )
    read = outbox._queue.async_q.get_nowait

    def read_then_write() -> OutputBatch:
        try:
            return read()
        except janus.AsyncQueueEmpty:
            if not writer.ident:
                writer.start()
                writer.join(0.1)  # it is done by now, unless it must wait for the reader
            raise

    monkeypatch.setattr(outbox._queue.async_q, "get_nowait", read_then_write)
    words = [texts(item) for batch in outbox._take_rest() for item in batch]
    writer.join()
    words += [texts(item) for batch in outbox._take_rest() for item in batch]
    assert "".join(words) == "one two three"
