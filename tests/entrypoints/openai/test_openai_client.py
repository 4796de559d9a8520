"""The official client understands every answer: one table of requests, over a real connection."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.entrypoints.openai.http_rig import (
    HELLO_TEXT,
    MODEL,
    Rig,
    TextParts,
    answers,
    openai_client,
    serving,
    speaks_pcm,
    tone,
    wav_base64,
)

PCM = tone(2000)
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SPOKEN: Any = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        rig.asr.script = answers("what I said")
        rig.voice.script = speaks_pcm(PCM)
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(rig) as client:
        yield client


async def test_text(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)

    assert [choice.message.content for choice in answer.choices] == [HELLO_TEXT] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(HELLO_TEXT.split())


async def test_audio(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **SPOKEN)

    (choice,) = answer.choices
    assert choice.message.audio is not None
    assert base64.b64decode(choice.message.audio.data) == PCM
    assert choice.message.audio.transcript == choice.message.content == HELLO_TEXT


async def test_voice_by_id(client: AsyncOpenAI) -> None:
    audio: Any = {"voice": {"id": "other"}, "format": "wav"}
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, modalities=["audio"], audio=audio
    )

    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.audio is not None


async def test_stream_of_text(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == HELLO_TEXT
    assert chunks[-1].usage is not None


async def test_stream_of_both(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, **SPOKEN
    )
    text, pcm, finishes = "", b"", []
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        audio: Any = choice.delta.model_dump().get("audio") or {}
        pcm += base64.b64decode(audio.get("data") or "")
        finishes.append(choice.finish_reason)

    assert (text, pcm) == (HELLO_TEXT, PCM)
    assert finishes[-1] == "stop"
    assert finishes.count("stop") == 1


async def test_audio_in(client: AsyncOpenAI) -> None:
    part: Any = {"type": "input_audio", "input_audio": {"data": wav_base64(), "format": "wav"}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": [part]}]
    )

    assert answer.choices[0].message.content == HELLO_TEXT


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Once")
    stream = await client.completions.create(model=MODEL, prompt=["Once", "Twice"], stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert answer.choices[0].text == HELLO_TEXT
    assert texts == [HELLO_TEXT] * 2


async def test_responses(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(model=MODEL, input="hi")

    assert answer.output_text == HELLO_TEXT


async def test_speech(client: AsyncOpenAI) -> None:
    answer = await client.audio.speech.create(
        model=MODEL, voice="default", input="Hello.", response_format="pcm"
    )

    assert answer.content == PCM


async def test_streamed_speech(client: AsyncOpenAI) -> None:
    async with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="default", input="Hello.", response_format="pcm", stream_format="audio"
    ) as answer:
        data = b"".join([part async for part in answer.iter_bytes()])

    assert data == PCM


async def test_models(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data

    assert model.id == MODEL
    extra = model.model_extra
    assert extra is not None
    assert extra["voices"] == ["default", "other"]
    assert extra["modalities"] == {"input": ["audio", "text"], "output": ["audio", "text"]}
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_their_class_and_name_the_field(client: AsyncOpenAI, rig: Rig) -> None:
    audio: Any = {"voice": "nobody", "format": "wav"}
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, modalities=["audio"], audio=audio
        )
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")

    assert (bad.value.param, bad.value.code) == ("audio.voice", "invalid_request")
    assert missing.value.code == "model_not_found"
