"""Plain streamed answers: events are those that vLLM's generator writes for the same outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from tests.entrypoints.openai.http_rig import (
    HELLO_TEXT,
    Rig,
    TextParts,
    answers,
    serving,
    speaks_pcm,
    tone,
)
from tests.fakes import Script
from vllm_omni.entrypoints.openai.chat import serving as chat
from vllm_omni.entrypoints.openai.chat.deltas import PlainAnswer


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        yield rig


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the answers that were written here and not by vLLM."""
    ids: list[str] = []

    class Counted(chat.PlainAnswer):
        def __init__(self, request_id: str, model: str, role: str) -> None:
            super().__init__(request_id, model, role)
            ids.append(request_id)

    monkeypatch.setattr(chat, "PlainAnswer", Counted)
    return ids


def comparable(events: list[Any]) -> list[Any]:
    """Events without what is another one's for each request; those of one answer share them."""
    ids = {(event["id"], event["created"]) for event in events if "id" in event}
    assert len(ids) <= 1
    return [{**event, "id": "", "created": 0} if "id" in event else event for event in events]


@pytest.mark.parametrize(
    "script",
    [
        answers("one"),
        answers("", "one"),
        answers("one ", "", 'two "quoted" \\ \n', "dr\u00fcei \U0001f600", ""),
        answers("one ", "two", reason="length"),
        answers(""),
    ],
    ids=["one", "late", "letters", "length", "nothing"],
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream_options": {"include_usage": True}}, {"add_generation_prompt": False}],
    ids=["", "usage", "role"],
)
async def test_events_are_those_of_vllm(
    rig: Rig,
    script: Script,
    fields: dict[str, Any],
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig.thinker.script = script

    ours = await rig.events(**fields)
    assert len(made) == 1
    monkeypatch.setattr(chat, "is_plain", lambda request: False)
    theirs = await rig.events(**fields)

    assert len(made) == 1
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"return_token_ids": True},
        {"echo": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_tells_more_is_left_to_vllm(
    rig: Rig, fields: dict[str, Any], made: list[str]
) -> None:
    await rig.chat(stream=True, **fields)
    assert not made


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]], ids=",".join)
@pytest.mark.parametrize(
    "fields", [{}, {"stream_options": {"include_usage": True}}], ids=["", "usage"]
)
async def test_the_words_of_a_spoken_answer_are_those_of_vllm(
    rig: Rig,
    modalities: list[str],
    fields: dict[str, Any],
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig.thinker.script = answers("one ", 'two "quoted"', " three")
    rig.voice.script = speaks_pcm(tone(200), tone(300))
    spoken = {"modalities": modalities, "audio": {"format": "pcm16"}, **fields}

    ours = await rig.events(**spoken)
    assert len(made) == 1
    monkeypatch.setattr(chat, "is_plain", lambda request: False)
    theirs = await rig.events(**spoken)

    assert len(made) == 1
    assert words(ours) == words(theirs)
    assert len(ours) == len(theirs)


def words(events: list[Any]) -> list[Any]:
    """Events but for those of audio, which come between them when it is there."""
    told = []
    for event in comparable(events[:-1]):  # the last says that it is the last
        audios = [choice["delta"].get("audio", {}) for choice in event["choices"]]
        for audio in audios:
            audio.pop("id", None)
        if not any("data" in audio or "expires_at" in audio for audio in audios):
            told.append(event)
    return told


async def test_the_words_are_there(rig: Rig, made: list[str]) -> None:
    events = await rig.events()
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert "".join(texts) == HELLO_TEXT
    assert made


async def test_an_answer_without_a_finish_is_not_said_twice() -> None:
    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        for text in ("one ", "two"):
            choice = CompletionOutput(0, text, [7], None, None)
            yield RequestOutput("r", None, [1, 2], None, [choice], False)

    async def write(rest: AsyncIterator[RequestOutput]) -> AsyncGenerator[str, None]:
        yield "data: role"
        async for output in rest:
            (choice,) = output.outputs
            yield f"data: {choice.text}|{len(choice.token_ids)}"

    answer = PlainAnswer("r", "m", "assistant")
    events = [event async for event in answer.events(outputs(), write)]
    assert [b'"content":"one "' in event for event in events] == [False, True, False, False]
    assert [b"two" in event for event in events] == [False, False, True, False]
    assert events[-1] == b"data: |2", "vLLM's generator counts all tokens"
