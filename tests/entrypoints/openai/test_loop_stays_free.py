"""What costs a processor's time is done in threads: the event loop answers others meanwhile.

No clock decides: the work waits, wherever it runs, until others were answered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.entrypoints.openai.http_rig import (
    Rig,
    TextParts,
    audio_part,
    say,
    serving,
    speaks_pcm,
    tone,
    wav_base64,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_POLLS = 50
"""A second of a monitor that asks 50 times a second."""
SERVING = "vllm_omni.entrypoints.openai"
SPOKEN = {"modalities": ["text", "audio"]}


class Gate:
    """Holds work back where it runs, unless that is the event loop."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.threads: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._opened = threading.Event()

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            self.threads.add(thread)
            self._loop.call_soon_threadsafe(self.entered.set)
            if thread != self._loop_thread:
                assert self._opened.wait(60.0), "nobody else was answered"
            return work(*args, **kwargs)

        return held

    def open(self) -> None:
        self._opened.set()

    @property
    def was_on_the_loop(self) -> bool:
        return self._loop_thread in self.threads


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.reset()
    shared.voice.script = speaks_pcm(*[tone(22050)] * 120)
    shared.asr.script = shared.thinker.script
    return shared


async def polls_health_meanwhile(rig: Rig, gate: Gate, url: str, body: object) -> httpx.Response:
    """The answer to a request whose work goes on only after every poll was answered."""
    asking = asyncio.create_task(rig.http.post(url, json=body))
    try:
        entered = asyncio.create_task(gate.entered.wait())
        await asyncio.wait({asking, entered}, timeout=60, return_when="FIRST_COMPLETED")
        assert entered.done(), "the work was not done where the test looks for it"
        for _ in range(NUM_POLLS):
            assert (await rig.http.get("/health")).status_code == 200
        assert not asking.done()
    finally:
        gate.open()
    return await asking


@pytest.mark.parametrize("form", ["mp3", "opus", "flac", "wav"])
async def test_two_minutes_of_a_chat_are_encoded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from vllm_omni.entrypoints.openai.chat import serving as chat

    gate = Gate()
    monkeypatch.setattr(chat, "encode_base64", gate.before(chat.encode_base64))
    body = say(**SPOKEN, audio={"format": form, "voice": "default"})

    answer = await polls_health_meanwhile(rig, gate, "/v1/chat/completions", body)

    assert len(answer.json()["choices"][0]["message"]["audio"]["data"]) > 100_000
    assert not gate.was_on_the_loop


@pytest.mark.parametrize("form", ["mp3", "flac"])
async def test_two_minutes_of_speech_are_encoded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """MP3 piece by piece, FLAC as one file: both open their codec in the thread that uses it."""
    import av

    gate = Gate()
    monkeypatch.setattr(av, "open", gate.before(av.open))
    body = {"model": "tiny", "input": "A long story.", "response_format": form}

    answer = await polls_health_meanwhile(rig, gate, "/v1/audio/speech", body)

    assert answer.status_code == 200
    assert len(answer.content) > 100_000
    assert not gate.was_on_the_loop


async def test_a_recording_is_decoded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.entrypoints.openai.media import loader

    gate = Gate()
    monkeypatch.setattr(loader, "decode_audio", gate.before(loader.decode_audio))
    body = say([audio_part(wav_base64(118 * 48_000, 48_000))])

    answer = await polls_health_meanwhile(rig, gate, "/v1/chat/completions", body)

    assert answer.status_code == 200, answer.text
    assert not gate.was_on_the_loop


async def test_a_prompt_is_tokenized(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    tokenizer = type(rig.thinker_preparer.renderer.get_tokenizer())
    monkeypatch.setattr(tokenizer, "__call__", gate.before(tokenizer.__call__))

    answer = await polls_health_meanwhile(rig, gate, "/v1/chat/completions", say("word " * 20))

    assert answer.status_code == 200, answer.text
    assert not gate.was_on_the_loop


async def test_other_requests_are_answered_while_a_codec_works(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import av

    gate = Gate()
    monkeypatch.setattr(av, "open", gate.before(av.open))
    body = {"model": "tiny", "input": "A long story.", "response_format": "mp3"}
    speaking = asyncio.create_task(rig.http.post("/v1/audio/speech", json=body))
    try:
        await asyncio.wait_for(gate.entered.wait(), 60)
        chats = await asyncio.gather(*(rig.chat() for _ in range(4)))
        streams = await asyncio.gather(*(rig.events() for _ in range(4)))
        assert not speaking.done()
    finally:
        gate.open()

    assert {chat.status_code for chat in chats} == {200}
    assert all(events[-1] == "[DONE]" for events in streams)
    assert (await speaking).status_code == 200
