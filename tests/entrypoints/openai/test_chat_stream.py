"""Streamed chat: order of events, joined audio, errors before and after the first, abort."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import av
import httpx
import numpy as np
import pytest
import soundfile

from tests.entrypoints.openai.http_rig import (
    HELLO,
    HELLO_TEXT,
    Rig,
    TextParts,
    answers,
    count_silences,
    live,
    play,
    say,
    serving,
    speaks_pcm,
    tone,
)
from tests.fakes import eventually, failure_output, text_output
from vllm_omni.engine.messages import StageOutput
from vllm_omni.outputs.media import AudioChunk


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        yield rig


def deltas(events: list[Any], index: int = 0) -> list[dict[str, Any]]:
    return [
        choice["delta"]
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    ]


def audio_bytes(events: list[Any], index: int = 0) -> bytes:
    parts = [delta.get("audio", {}).get("data") for delta in deltas(events, index)]
    return b"".join(base64.b64decode(part) for part in parts if part)


def content(events: list[Any], index: int = 0) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(events, index))


def transcript(events: list[Any], index: int = 0) -> str:
    found = [delta.get("audio", {}).get("transcript") for delta in deltas(events, index)]
    return "".join(part or "" for part in found)


async def test_text_streams_as_in_vllm(rig: Rig) -> None:
    events = await rig.events(stream_options={"include_usage": True})

    assert content(events) == HELLO_TEXT
    assert not any("audio" in delta for delta in deltas(events))
    assert events[-2]["usage"]["completion_tokens"] == len(HELLO_TEXT.split())
    assert events[-1] == "[DONE]"


async def test_both_modalities_in_one_choice(rig: Rig) -> None:
    pcm = tone(3000)
    rig.voice.script = speaks_pcm(pcm[:2000], pcm[2000:])

    events = await rig.events(
        modalities=["text", "audio"], audio={"format": "pcm16", "voice": "default"}
    )

    assert content(events) == transcript(events) == HELLO_TEXT
    assert audio_bytes(events) == pcm
    ids = {delta["audio"]["id"] for delta in deltas(events) if "audio" in delta}
    assert len(ids) == 1
    assert {choice["index"] for event in events[:-1] for choice in event["choices"]} == {0}


async def test_silences_of_a_streamed_answer_are_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silences = count_silences(monkeypatch, "chat")
    play(rig, monkeypatch, tone(6615), 4410)
    spoken = {"modalities": ["text", "audio"], "audio": {"format": "mp3", "voice": "default"}}

    assert (await rig.chat(**spoken)).status_code == 200
    assert not silences, "a whole answer has none"
    await rig.events(**spoken)
    assert silences == [("voice", pytest.approx(0.9)), ("voice", pytest.approx(0.9))]


async def test_audio_alone_streams_its_transcript_and_no_content(rig: Rig) -> None:
    events = await rig.events(modalities=["audio"])

    assert not any("content" in delta for delta in deltas(events))
    assert transcript(events) == HELLO_TEXT
    assert audio_bytes(events).startswith(b"RIFF")


@pytest.mark.parametrize("form", ["wav", "pcm16", "mp3", "flac", "opus"])
async def test_what_nobody_can_speak_streams_its_transcript_alone(rig: Rig, form: str) -> None:
    rig.thinker.script = answers("...", " ...")
    rig.voice.script = speaks_pcm(b"")
    events = await rig.events(modalities=["audio"], audio={"format": form, "voice": "default"})

    assert transcript(events) == "... ..."
    assert not any(
        {"data", "expires_at"} & delta.get("audio", {}).keys() for delta in deltas(events)
    )
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_the_finish_comes_once_and_last(rig: Rig) -> None:
    events = await rig.events(
        modalities=["text", "audio"], n=2, stream_options={"include_usage": True}
    )

    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * len(HELLO_TEXT.split())
    for index in (0, 1):
        reasons = [
            choice["finish_reason"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert reasons.count("stop") == 1
        assert reasons[-1] == "stop"
        expiry = [d["audio"].get("expires_at") for d in deltas(chunks, index) if "audio" in d]
        assert isinstance(expiry[-1], int)
        assert audio_bytes(chunks, index)


@pytest.mark.parametrize("chunk_samples", [1, 2, 3, 7, 25])
@pytest.mark.parametrize("form", ["pcm16", "wav", "flac"])
async def test_joined_audio_is_the_source(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, chunk_samples: int, form: str
) -> None:
    pcm = tone(211)
    play(rig, monkeypatch, pcm, 2 * chunk_samples)

    events = await rig.events(modalities=["audio"], audio={"format": form, "voice": "default"})

    data = audio_bytes(events)
    if form != "flac":
        num_pieces = sum("data" in delta.get("audio", {}) for delta in deltas(events))
        assert num_pieces == -(-211 // chunk_samples)
    if form == "pcm16":
        assert data == pcm
        return
    assert data.count(b"RIFF") == (form == "wav")
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        samples = file.read(400, dtype="int16")
        assert file.samplerate == 22050
    assert samples.tobytes() == pcm


@pytest.mark.parametrize("form", ["mp3", "opus"])
async def test_joined_lossy_audio_is_one_valid_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    play(rig, monkeypatch, tone(22050), 1400)

    events = await rig.events(modalities=["audio"], audio={"format": form, "voice": "default"})

    with av.open(io.BytesIO(audio_bytes(events))) as container:
        frames = [frame.to_ndarray().mean(axis=0) for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    samples = np.concatenate(frames)
    assert samples.size / rate == pytest.approx(1.0, abs=0.1)
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) * rate / samples.size == pytest.approx(440, abs=3)


def _emit(rig: Rig, text: str | None, pcm: bytes | None, *, finished: bool = False) -> None:
    if text is not None:
        request_id = rig.thinker.added[0].request_id
        rig.thinker.emit(text_output(request_id, text, finished=finished))
    if pcm is not None:
        chunk = AudioChunk(pcm, 22050) if pcm else None
        rig.voice.emit(StageOutput(rig.voice.added[0].request_id, finished, audio=chunk))


class Reader:
    """Events of a streamed answer as they arrive over a real connection."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> Any:
        while not (line := await anext(self._lines)):
            pass
        word = line.removeprefix("data: ")
        return word if word == "[DONE]" else json.loads(word)


async def test_text_and_audio_interleave_as_they_come(rig: Rig) -> None:
    rig.thinker.script = lambda request: [text_output(request.request_id, "One. ")]
    rig.voice.script = None
    pcm = tone(400)
    body = say(
        modalities=["text", "audio"], stream=True, audio={"format": "pcm16", "voice": "default"}
    )
    async with (
        live(rig) as url,
        httpx.AsyncClient(trust_env=False) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        reader = Reader(response)
        seen = [await reader.next(), await reader.next()]
        # The text goes on while the first clause is heard already.
        _emit(rig, None, pcm[:400])
        seen.append(await reader.next())
        _emit(rig, "Two.", None)
        seen.append(await reader.next())
        # All of the text is written, and its finish waits for the voice.
        _emit(rig, "", None, finished=True)
        _emit(rig, None, pcm[400:])
        seen += [await reader.next(), await reader.next()]
        _emit(rig, None, b"", finished=True)
        seen += [await reader.next(), await reader.next(), await reader.next()]

    kinds = [
        "".join(name[0] for name in ("role", "content") if delta.get(name))
        + ("a" if delta.get("audio", {}).get("data") else "")
        for delta in deltas(seen)
    ]
    assert kinds == ["r", "c", "a", "c", "", "a", "", ""]
    assert audio_bytes(seen) == pcm
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in seen[:-1]]
    assert finishes == [None] * 7 + ["stop"]


async def test_an_error_before_the_first_output_has_a_status(rig: Rig) -> None:
    rig.thinker.script = lambda request: [failure_output(request.request_id, "it broke")]

    for modalities in (["text"], ["text", "audio"]):
        response = await rig.chat(stream=True, modalities=modalities)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "request_failed"


async def test_an_error_after_it_is_an_event(rig: Rig) -> None:
    rig.thinker.script = lambda request: [text_output(request.request_id, HELLO[0])]
    rig.voice.script = None
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = say(modalities=["text", "audio"], stream=True)
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            reader = Reader(response)
            await reader.next()
            await reader.next()
            rig.voice.emit(failure_output(rig.voice.added[0].request_id, "the voice broke"))
            error = await reader.next()
            assert await reader.next() == "[DONE]"

    assert error["error"]["code"] == "request_failed"
    assert "the voice broke" in error["error"]["message"]


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
async def test_leaving_aborts_every_stage(rig: Rig, modalities: list[str]) -> None:
    rig.thinker.script = lambda request: [text_output(request.request_id, HELLO[0])]
    rig.voice.script = None
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = say(modalities=modalities, stream=True)
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            await Reader(response).next()
        await eventually(lambda: bool(rig.thinker.abort_calls))
        if "audio" in modalities:
            await eventually(lambda: bool(rig.voice.abort_calls))

    assert rig.thinker.abort_calls == [rig.thinker.added_ids]
    rig.omni.check_admission(rig.omni.limits.max_in_flight)


async def test_leaving_before_the_first_output_aborts_too(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.thinker.script = None
    async with live(rig) as url:
        for is_stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(timeout=0.3, trust_env=False) as http:
                    await http.post(f"{url}/v1/chat/completions", json=say(stream=is_stream))
        await eventually(lambda: len(rig.thinker.abort_calls) == 2)

    assert [ids for call in rig.thinker.abort_calls for ids in call] == rig.thinker.added_ids
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
