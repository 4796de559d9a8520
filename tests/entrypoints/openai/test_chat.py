"""Chat answers: what a client gets for each combination of modalities, and what it cannot get."""

from __future__ import annotations

import base64
import dataclasses
import io
import wave
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.entrypoints.openai.http_rig import (
    HELLO_TEXT,
    PLACEHOLDER,
    Rig,
    TextParts,
    answers,
    audio_part,
    say,
    serving,
    speaking_pipeline,
    speaks_pcm,
    tone,
)
from tests.fakes import eventually, says
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.inputs.speech import SpeechParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.reset()
    return shared


def samples_of(wav: bytes) -> bytes:
    with wave.open(io.BytesIO(wav)) as file:
        return file.readframes(file.getnframes())


async def test_text_is_the_default(rig: Rig) -> None:
    response = await rig.chat()

    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == HELLO_TEXT
    assert choice["message"]["audio"] is None
    assert choice["finish_reason"] == "stop"
    assert not rig.voice.added


async def test_text_and_audio_come_in_one_choice(rig: Rig) -> None:
    pcm = tone(5000)
    rig.voice.script = speaks_pcm(pcm[:4000], pcm[4000:])

    response = await rig.chat(modalities=["text", "audio"])

    (choice,) = response.json()["choices"]
    audio = choice["message"]["audio"]
    assert choice["message"]["content"] == HELLO_TEXT
    assert audio["transcript"] == HELLO_TEXT
    assert audio["id"]
    assert isinstance(audio["expires_at"], int)
    assert samples_of(base64.b64decode(audio["data"])) == pcm


async def test_audio_alone_has_no_content_but_a_transcript(rig: Rig) -> None:
    response = await rig.chat(modalities=["audio"])

    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["audio"]["transcript"] == HELLO_TEXT
    assert response.json()["usage"]["completion_tokens"] == len(HELLO_TEXT.split())


async def test_every_choice_has_its_own_audio(rig: Rig) -> None:
    response = await rig.chat(modalities=["text", "audio"], n=3, seed=5)

    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["audio"]["id"] for choice in choices}) == 3
    assert all(choice["message"]["audio"]["data"] for choice in choices)
    assert response.json()["usage"]["completion_tokens"] == 3 * len(HELLO_TEXT.split())


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
@pytest.mark.parametrize("text", ["", "...", "\U0001f600"])
@pytest.mark.parametrize("voice", [speaks_pcm(), speaks_pcm(b"")])
async def test_an_answer_that_nobody_can_speak_has_no_audio_and_keeps_its_words(
    rig: Rig, text: str, modalities: list[str], voice: Any
) -> None:
    rig.thinker.script = says(text)
    rig.voice.script = voice

    response = await rig.chat(modalities=modalities)

    (choice,) = response.json()["choices"]
    assert response.status_code == 200
    assert choice["message"]["content"] == text
    assert choice["message"]["audio"] is None
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("form", ["wav", "pcm16", "mp3", "flac", "opus"])
async def test_the_format_is_the_one_asked_for(rig: Rig, form: str) -> None:
    rig.voice.script = speaks_pcm(tone(4000))

    response = await rig.chat(modalities=["audio"], audio={"voice": "default", "format": form})

    data = base64.b64decode(response.json()["choices"][0]["message"]["audio"]["data"])
    magic = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": b"\xff"}.get(form, b"")
    assert data.startswith(magic)
    assert len(data) == 8000 if form == "pcm16" else data


@pytest.mark.parametrize("voice", ["other", {"id": "other"}])
async def test_the_voice_reaches_the_speaking_stage(rig: Rig, voice: object) -> None:
    await rig.chat(modalities=["audio"], audio={"voice": voice, "format": "wav"}, seed=9)

    assert rig.voice.added[0].params == SpeechParams(voice="other", seed=9)


async def test_sampling_fields_reach_the_thinker(rig: Rig) -> None:
    await rig.chat(
        max_tokens=7,
        temperature=0.25,
        top_p=0.5,
        seed=3,
        stop=["END"],
        min_tokens=2,
        logprobs=False,
    )

    params: Any = rig.thinker.added[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.25, 0.5)
    assert (params.seed, params.stop, params.min_tokens) == (3, ["END"], 2)


async def test_params_of_every_stage_can_be_given(rig: Rig) -> None:
    rig.asr.script = answers("words")

    response = await rig.chat(
        content=[audio_part()],
        modalities=["audio"],
        temperature=0.5,
        sampling_params_list=[
            {"max_tokens": 11},
            {"max_tokens": 13, "temperature": 0.9, "detokenize": True},
            {"speed": 2.0},
        ],
    )

    assert response.status_code == 200, response.text
    asr: Any = rig.asr.added[0].params
    thinker: Any = rig.thinker.added[0].params
    assert (asr.max_tokens, thinker.max_tokens, thinker.temperature) == (11, 13, 0.5)
    assert rig.voice.added[0].params == SpeechParams(speed=2.0)


async def test_own_fields_win_over_the_list(rig: Rig) -> None:
    await rig.chat(
        modalities=["audio"],
        temperature=0.5,
        sampling_params_list=[None, {"max_tokens": 13, "temperature": 0.9}, {"speed": 2.0}],
    )

    params: Any = rig.thinker.added[0].params
    assert (params.max_tokens, params.temperature) == (13, 0.5)
    assert rig.voice.added[0].params == SpeechParams(speed=2.0)


async def test_audio_in_goes_to_the_recogniser_with_a_placeholder_in_the_text(rig: Rig) -> None:
    rig.asr.script = answers("what I said")

    response = await rig.chat(content=[audio_part(), {"type": "text", "text": "please"}])

    assert response.status_code == 200, response.text
    prompt: Any = rig.asr.added[0].prompt
    assert prompt.text.count(PLACEHOLDER) == 1
    assert "please" in prompt.text
    assert [(item.samples.shape, item.sample_rate_hz) for item in prompt.audio] == [
        ((8000,), 16000)
    ]


@pytest.mark.parametrize("kind", ["audio_url", "file"])
async def test_audio_in_may_be_a_data_url_or_a_file(rig: Rig, kind: str) -> None:
    rig.asr.script = answers("what I said")
    url = f"data:audio/wav;base64,{audio_part()['input_audio']['data']}"
    named = {"url": url} if kind == "audio_url" else {"file_data": url, "filename": "a.wav"}

    response = await rig.chat(content=[{"type": kind, kind: named}])

    assert response.status_code == 200, response.text
    prompt: Any = rig.asr.added[0].prompt
    assert prompt.audio[0].samples.shape == (8000,)


async def test_several_recordings_keep_their_order(rig: Rig) -> None:
    rig.asr.script = answers("words")
    from tests.entrypoints.openai.http_rig import wav_base64

    parts = [audio_part(wav_base64(num)) for num in (1600, 3200)]
    await rig.chat(content=parts)

    prompt: Any = rig.asr.added[0].prompt
    assert [item.samples.size for item in prompt.audio] == [1600, 3200]
    assert prompt.text.count(PLACEHOLDER) == 2


async def test_text_answers_need_no_voice(text_parts: TextParts) -> None:
    async with serving(text_parts) as rig:
        rig.voice.crash()
        await eventually(lambda: "voice" in rig.omni.dead_stages())

        assert (await rig.chat()).status_code == 200
        spoken = await rig.chat(modalities=["audio"])
    assert spoken.status_code == 503
    assert spoken.json()["error"]["code"] == "stage_unavailable"
    assert spoken.json()["error"]["message"] == "Stage-2 has no live replica (voice)"
    assert spoken.headers["retry-after"]


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"modalities": ["smell"]}, "modalities", "unsupported_modality"),
    ({"modalities": ["image"]}, "modalities", "unsupported_modality"),
    ({"modalities": []}, "modalities", "invalid_request"),
    ({"modalities": "audio"}, "modalities", "invalid_request"),
    ({"messages": []}, "messages", "invalid_request"),
    ({"messages": None}, "messages", "invalid_request"),
    ({"messages": [{}]}, "messages[0].role", "invalid_request"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_request"),
    ({"messages": [{"role": "user", "content": ["a"] * 5000}]}, "messages", "invalid_request"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "invalid_request"),
    ({"structured_outputs": "x"}, "structured_outputs", "invalid_request"),
    ({"audio": {"voice": "nobody"}}, "audio.voice", "invalid_request"),
    ({"audio": {"format": "midi"}}, "audio.format", "invalid_request"),
    ({"audio": {"pitch": 3}}, "audio.pitch", "invalid_request"),
    ({"sampling_params_list": [{}]}, "sampling_params_list", "invalid_request"),
    (
        {"sampling_params_list": [None, {"temprature": 1}, None]},
        "sampling_params_list[1].temprature",
        "invalid_request",
    ),
    (
        {"sampling_params_list": [None, {"temperature": "hot"}, None]},
        "sampling_params_list[1].temperature",
        "invalid_request",
    ),
    (
        {"sampling_params_list": [None, None, {"volume": 3}]},
        "sampling_params_list[2]",
        "invalid_request",
    ),
    (
        {"sampling_params_list": [None, None, {"speed": 9}]},
        "sampling_params_list[2].speed",
        "invalid_request",
    ),
    ({"vllm_xargs": {"omni_targets": "x"}}, "vllm_xargs.omni_targets", "invalid_request"),
    ({"model": "nope"}, "model", "model_not_found"),
    ({"max_tokens": 100_000}, "max_tokens", "invalid_request"),
    (
        {
            "modalities": ["audio"],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        },
        "tools",
        "invalid_request",
    ),
    ({"modalities": ["audio"], "use_beam_search": True}, "use_beam_search", "invalid_request"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(
    rig: Rig, fields: dict[str, object], param: str, code: str, is_stream: bool
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}

    response = await rig.http.post("/v1/chat/completions", json={**body, "stream": is_stream})

    assert response.status_code == (404 if code == "model_not_found" else 400), response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"]
    assert not rig.thinker.added


async def test_a_route_of_vllm_s_does_not_ignore_that_audio_is_wanted(rig: Rig) -> None:
    spoken = await rig.http.post("/invocations", json=say(modalities=["audio"]))
    written = await rig.http.post("/invocations", json=say(modalities=["text"]))

    assert (spoken.status_code, spoken.json()["error"]["param"]) == (400, "modalities")
    assert written.status_code == 200, written.text


def a_file(data: object) -> dict[str, object]:
    return {"type": "file", "file": {"file_data": data, "filename": "a.wav"}}


BAD_PARTS: list[tuple[object, str]] = [
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, ""),
    ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/x.mp4"}}, ""),
    ({"type": "input_audio"}, ".input_audio"),
    ({"type": "input_audio", "input_audio": "x"}, ".input_audio"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, ".input_audio.data"),
    ({"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}, ".input_audio.data"),
    (audio_part("%%%%"), ".input_audio.data"),
    (audio_part(base64.b64encode(b"no audio at all").decode()), ".input_audio.data"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ".input_audio.data"),
    (audio_part(form="midi"), ".input_audio.format"),
    (audio_part(form="mp3"), ".input_audio.format"),
    ({"type": "audio_url", "audio_url": {"url": 3}}, ".audio_url.url"),
    ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}, ".audio_url.url"),
    ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, ".audio_url.url"),
    ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,xyz"}}, ".audio_url.url"),
    (a_file("data:image/png;base64,AAAA"), ".file.file_data"),
    (a_file("data:application/pdf;base64,AAAA"), ".file.file_data"),
    (a_file("data:audio/wav;base64,AAAA"), ".file.file_data"),
    (a_file("data:;base64,AAAA"), ".file.file_data"),
    (a_file("AAAA"), ".file.file_data"),
    (a_file(None), ".file.file_data"),
    ({"type": "file", "file": {"file_id": "file-1"}}, ".file.file_id"),
    ({"file": "x"}, ".file"),
    ({"type": "text", "text": f"look: {PLACEHOLDER}"}, ".text"),
    ({"type": "text"}, ".text"),
    ({"type": "text", "text": 5}, ".text"),
    ({}, ".text"),
    (3, ""),
]


@pytest.mark.parametrize(("part", "below"), BAD_PARTS)
async def test_a_bad_part_is_named_by_its_path(rig: Rig, part: object, below: str) -> None:
    response = await rig.chat(content=[{"type": "text", "text": "hi"}, part])

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"messages[0].content[1]{below}"
    assert not rig.asr.added


async def test_audio_of_an_earlier_answer_is_not_kept(rig: Rig) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "audio": {"id": "audio_1"}},
        {"role": "user", "content": "again"},
    ]

    response = await rig.http.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].audio.id"


async def test_a_prompt_over_the_context_is_refused(rig: Rig) -> None:
    response = await rig.chat(content="word " * 2000)

    assert response.status_code == 400, response.text
    assert "256" in response.json()["error"]["message"]


async def test_media_are_counted_before_they_are_decoded(text_parts: TextParts) -> None:
    async with serving(text_parts, limits=ServerLimits(max_media_items=2)) as rig:
        response = await rig.chat(content=[audio_part("%%%%")] * 3)

    assert response.status_code == 400
    assert "at most 2" in response.json()["error"]["message"]


async def test_reasoning_is_not_spoken(text_parts: TextParts) -> None:
    from argparse import Namespace

    config = Namespace(reasoning_parser="granite")
    async with serving(text_parts, structured_outputs_config=config) as rig:
        response = await rig.chat(modalities=["audio"])

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "modalities"


async def test_the_stages_own_defaults_stand_under_the_request(text_parts: TextParts) -> None:
    pipeline = speaking_pipeline()
    asr, thinker, voice = pipeline.stages
    thinker = dataclasses.replace(thinker, default_params={"temperature": 0.2, "max_tokens": 9})
    asr = dataclasses.replace(asr, default_params={"extra_args": {"speech_to_text": {"a": 1}}})
    changed = dataclasses.replace(pipeline, stages=(asr, thinker, voice))
    async with serving(text_parts, pipeline=changed) as rig:
        rig.asr.script = answers("words")
        await rig.chat()
        await rig.chat(temperature=0.7, max_tokens=20)
        await rig.chat(content=[audio_part()], sampling_params_list=[{"seed": 3}, None, None])
        await rig.http.post("/v1/completions", json={"prompt": "hi"})

        requests: Any = [request.params for request in rig.thinker.added]
        recogniser: Any = rig.asr.added[0].params
    seen = [(params.temperature, params.max_tokens) for params in requests]
    # Completions have a limit of OpenAI's own when they name none.
    assert seen == [(0.2, 9), (0.7, 20), (0.2, 9), (0.2, 16)]
    assert recogniser.seed == 3
    assert recogniser.extra_args == {"speech_to_text": {"a": 1}}
