"""/v1/audio/speech: formats, streaming, refusals, faults."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import av
import httpx
import pytest
import pytest_asyncio
import soundfile

from tests.entrypoints.openai.http_rig import (
    Rig,
    TextParts,
    count_silences,
    live,
    parse_events,
    play,
    serving,
    speaks_pcm,
    tone,
)
from tests.fakes import eventually, failure_output
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.engine.messages import StageOutput
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk

URL = "/v1/audio/speech"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(text_parts: TextParts) -> AsyncIterator[Rig]:
    limits = ServerLimits(max_speech_chars=40)
    async with serving(text_parts, limits=limits) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.reset()
    shared.voice.script = speaks_pcm(tone(3000), tone(2000))
    return shared


@asynccontextmanager
async def first_samples(rig: Rig, pcm: bytes) -> AsyncIterator[None]:
    """Emit `pcm` as soon as the voice has a request; a body is being waited for meanwhile."""

    async def emit() -> None:
        await eventually(lambda: bool(rig.voice.added))
        rig.voice.emit(StageOutput(rig.voice.added[0].request_id, audio=AudioChunk(pcm, 22050)))

    task = asyncio.create_task(emit())
    yield
    await task


async def speak(rig: Rig, **fields: object) -> httpx.Response:
    return await rig.http.post(URL, json={"model": "tiny", "input": "Hello.", **fields})


@pytest.mark.parametrize("form", ["mp3", "pcm"])
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_silences_of_streamed_speech_are_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: str, stream_format: str
) -> None:
    silences = count_silences(monkeypatch, "speech")
    with monkeypatch.context() as patch:
        play(rig, patch, tone(6615), 4410)
        await speak(rig, response_format="wav")
        assert not silences, "a whole file has none"
        response = await speak(rig, response_format=form, stream_format=stream_format)
    assert response.status_code == 200
    assert silences == [("voice", pytest.approx(0.9)), ("voice", pytest.approx(0.9))]


async def test_mp3_is_the_default(rig: Rig) -> None:
    response = await speak(rig, voice="other", speed=1.5, seed=4)

    assert response.headers["content-type"] == "audio/mpeg"
    with av.open(io.BytesIO(response.content)) as container:
        assert container.format.name == "mp3"
    (request,) = rig.voice.added
    assert request.params == SpeechParams(voice="other", speed=1.5, seed=4)
    assert not rig.thinker.added


async def test_wav_is_a_whole_file_with_its_length(rig: Rig) -> None:
    response = await speak(rig, response_format="wav")

    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getframerate(), file.getnframes()) == (22050, 5000)
        assert file.readframes(5000) == tone(3000) + tone(2000)
    assert int(response.headers["content-length"]) == len(response.content)


async def test_flac_is_a_whole_file(rig: Rig) -> None:
    response = await speak(rig, response_format="flac")

    samples, rate = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert (samples.tobytes(), rate) == (tone(3000) + tone(2000), 22050)


async def test_pcm_names_its_rate(rig: Rig) -> None:
    response = await speak(rig, response_format="pcm")

    assert response.content == tone(3000) + tone(2000)
    assert response.headers["x-sample-rate"] == "22050"


@pytest.mark.parametrize("form", ["opus", "aac", "mp3", "wav", "flac"])
async def test_every_format_streams_one_valid_file(rig: Rig, form: str) -> None:
    response = await speak(rig, response_format=form, stream_format="audio")

    with av.open(io.BytesIO(response.content)) as container:
        stream = container.streams.audio[0]
        num_samples = sum(frame.samples for frame in container.decode(stream))
        assert num_samples / stream.rate == pytest.approx(5000 / 22050, abs=0.12)


async def test_events_carry_base64_and_end_with_usage(rig: Rig) -> None:
    response = await speak(rig, response_format="pcm", stream_format="sse")

    *chunks, done = parse_events(response.text)
    assert {chunk["type"] for chunk in chunks} == {"speech.audio.delta"}
    joined = b"".join(base64.b64decode(chunk["audio"]) for chunk in chunks)
    assert joined == tone(3000) + tone(2000)
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["input_tokens"] == len("Hello.")
    assert done["usage"]["audio_seconds"] == pytest.approx(5000 / 22050, abs=0.001)


async def test_the_first_bytes_do_not_wait_for_the_last(rig: Rig) -> None:
    rig.voice.script = None
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"input": "Hello.", "response_format": "pcm"}
        posting = http.stream("POST", url + URL, json=body)
        async with first_samples(rig, tone(100)), posting as response:
            parts = response.aiter_raw()
            assert await anext(parts) == tone(100)
            rig.voice.emit(StageOutput(rig.voice.added[0].request_id, True))
            assert [part async for part in parts] == []


async def test_an_error_before_the_first_byte_has_a_status(rig: Rig) -> None:
    rig.voice.script = lambda request: [failure_output(request.request_id, "it broke")]

    response = await speak(rig)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"


async def test_an_error_after_it_breaks_the_body_off(rig: Rig) -> None:
    rig.voice.script = None
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"input": "Hello.", "response_format": "pcm"}
        posting = http.stream("POST", url + URL, json=body)
        async with first_samples(rig, tone(100)), posting as response:
            parts = response.aiter_raw()
            await anext(parts)
            rig.voice.emit(failure_output(rig.voice.added[0].request_id, "it broke"))
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(parts)


async def test_an_error_after_it_is_an_event_in_sse(rig: Rig) -> None:
    rig.voice.script = lambda request: [
        StageOutput(request.request_id, audio=AudioChunk(tone(100), 22050)),
    ]
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"input": "Hello.", "response_format": "pcm", "stream_format": "sse"}
        async with http.stream("POST", url + URL, json=body) as response:
            rig.voice.emit(failure_output(rig.voice.added[0].request_id, "it broke"))
            text = "".join([part async for part in response.aiter_text()])

    first, last = parse_events(text)
    assert first["type"] == "speech.audio.delta"
    assert last["error"]["code"] == "request_failed"


async def test_leaving_aborts_the_voice(rig: Rig) -> None:
    rig.voice.script = lambda request: [
        StageOutput(request.request_id, audio=AudioChunk(tone(100), 22050)),
    ]
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"input": "Hello.", "response_format": "pcm"}
        async with http.stream("POST", url + URL, json=body):
            pass
        await eventually(lambda: bool(rig.voice.abort_calls))

    assert rig.voice.abort_calls == [rig.voice.added_ids]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"input": "x" * 41}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"voice": "nobody"}, "voice"),
    ({"voice": {"id": "nobody"}}, "voice"),
    ({"voice": {"name": "other"}}, "voice"),
    ({"response_format": "midi"}, "response_format"),
    ({"speed": 0.1}, "speed"),
    ({"speed": 4.5}, "speed"),
    ({"speed": "fast"}, "speed"),
    ({"instructions": "whisper"}, "instructions"),
    ({"stream_format": "smoke"}, "stream_format"),
    ({"seed": 2**70}, "seed"),
    ({"pitch": 3}, "pitch"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_cannot_be_spoken_is_refused_by_name(
    rig: Rig, fields: dict[str, object], param: str
) -> None:
    response = await speak(rig, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert error["code"] == "invalid_request"
    assert not rig.voice.added


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
@pytest.mark.parametrize("form", ["mp3", "wav", "pcm", "flac"])
async def test_a_text_of_which_nothing_is_heard_is_refused(
    rig: Rig, form: str, stream_format: str | None
) -> None:
    rig.voice.script = speaks_pcm(b"")
    fields = {} if stream_format is None else {"stream_format": stream_format}
    response = await speak(rig, input="...", response_format=form, **fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "input"


async def test_an_unknown_model_is_not_found(rig: Rig) -> None:
    response = await speak(rig, model="nope")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_known_voices_are_listed_in_the_refusal(rig: Rig) -> None:
    response = await speak(rig, voice="nobody")

    assert "default, other" in response.json()["error"]["message"]
