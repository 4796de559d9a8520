"""/v1/audio/transcriptions over a tiny recogniser's real configuration and fake replicas."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.entrypoints.openai.http_rig import (
    Rig,
    TextParts,
    answers,
    openai_client,
    parse_events,
    serving,
    wav_base64,
)
from tests.fakes import failure_output
from tests.tiny_models import make_tiny_whisper
from vllm_omni.config.deploy import ServerLimits

URL = "/v1/audio/transcriptions"
RECORDING = base64.b64decode(wav_base64(16000))


@pytest.fixture(scope="module")
def parts(text_parts: TextParts, tmp_path_factory: pytest.TempPathFactory) -> TextParts:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_omni.engine.ar_preparer import ArPreparer

    model_dir = make_tiny_whisper(tmp_path_factory.mktemp("whisper"))
    config = AsyncEngineArgs(model=str(model_dir), dtype="float32").create_engine_config()
    return TextParts(text_parts.args, text_parts.preparer, ArPreparer("asr", config))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(parts: TextParts) -> AsyncIterator[Rig]:
    limits = ServerLimits(max_audio_bytes=200_000, max_audio_s=40.0)
    async with serving(parts, limits=limits) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.reset()
    shared.asr.script = answers("what", " I", " said")
    return shared


async def transcribe(rig: Rig, data: bytes = RECORDING, **fields: Any) -> httpx.Response:
    return await rig.http.post(
        URL, files={"file": ("a.wav", data)}, data={"model": "tiny", "language": "en", **fields}
    )


async def test_json(rig: Rig) -> None:
    response = await transcribe(rig)

    assert response.status_code == 200, response.text
    assert response.json()["text"] == "what I said"
    assert response.json()["usage"] == {"type": "duration", "seconds": 1}
    assert len(rig.asr.added) == 1
    assert not rig.thinker.added


async def test_text_is_plain(rig: Rig) -> None:
    response = await transcribe(rig, response_format="text")

    assert response.text == "what I said\n"
    assert response.headers["content-type"].startswith("text/plain")


async def test_a_long_recording_is_several_prompts(rig: Rig) -> None:
    response = await transcribe(rig, base64.b64decode(wav_base64(35 * 2000, 2000)))

    assert response.status_code == 200, response.text
    assert response.json()["text"] == "what I said what I said"


async def test_it_streams(rig: Rig) -> None:
    response = await transcribe(rig, stream="true")

    *chunks, whole, done = parse_events(response.text)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text.split() == ["what", "I", "said"]
    assert (whole["type"], whole["text"]) == ("transcript.text.done", text)
    assert done == "[DONE]"


async def test_the_official_client_reads_it(rig: Rig) -> None:
    async with openai_client(rig) as client:
        answer = await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", RECORDING), language="en"
        )
        text: Any = await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", RECORDING), language="en", response_format="text"
        )

        stream = await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", RECORDING), language="en", stream=True
        )
        events: list[Any] = [event async for event in stream]

    assert answer.text == "what I said"
    assert text == "what I said\n"
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "what I said"


@pytest.mark.parametrize(
    ("data", "fields", "param"),
    [
        (b"", {}, "file"),
        (b"no audio", {}, "file"),
        (RECORDING[:20000], {}, "file"),
        (base64.b64decode(wav_base64(100)), {}, "file"),
        (b"RIFF" + b"\0" * 60, {}, "file"),
        (bytes(200_001), {}, "file"),
        (base64.b64decode(wav_base64(41 * 2000, 2000)), {}, "file"),
        (RECORDING, {"response_format": "papyrus"}, "response_format"),
        (RECORDING, {"temperature": "warm"}, "temperature"),
        (RECORDING, {"model": "nope"}, "model"),
        (RECORDING, {"language": "klingon"}, "language"),
        (RECORDING, {"top_k": "-7"}, "top_k"),
        (RECORDING, {"repetition_penalty": "0"}, "repetition_penalty"),
        (RECORDING, {"max_completion_tokens": "0"}, "max_completion_tokens"),
        (RECORDING, {"n": "3"}, "n"),
        (RECORDING, {"modalities": "audio"}, "modalities"),
        (RECORDING, {"chunking_strategy": "auto"}, "chunking_strategy"),
        (RECORDING, {"timestamp_granularities": "word"}, "timestamp_granularities"),
        (RECORDING, {"timestamp_granularities[]": "letter"}, "timestamp_granularities[0]"),
        (RECORDING, {"response_format": "srt"}, "response_format"),
        (RECORDING, {"response_format": "vtt", "stream": "true"}, "stream"),
    ],
)
async def test_what_cannot_be_transcribed_is_refused(
    rig: Rig, data: bytes, fields: dict[str, Any], param: str | None
) -> None:
    response = await transcribe(rig, data, **fields)

    assert response.status_code == (404 if "model" in fields else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert isinstance(error["code"], str)
    assert not rig.asr.added


async def test_a_form_without_a_file_is_refused(rig: Rig) -> None:
    for data in ({}, {"file": "not an upload"}):
        response = await rig.http.post(URL, data={"model": "tiny", **data})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "file"
        assert response.json()["error"]["code"] == "invalid_request"


async def test_a_second_file_is_not_ignored(rig: Rig) -> None:
    files = [("file", ("a.wav", RECORDING)), ("file", ("b.wav", RECORDING))]
    response = await rig.http.post(URL, files=files)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "file"
    assert not rig.asr.added


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_failure_has_a_status(rig: Rig, stream: str) -> None:
    rig.asr.script = lambda request: [failure_output(request.request_id, "it broke")]

    response = await transcribe(rig, stream=stream)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"


async def test_a_model_that_does_not_transcribe_says_so(text_parts: TextParts) -> None:
    async with serving(text_parts) as rig:
        response = await transcribe(rig)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
