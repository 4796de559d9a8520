"""A pipeline whose prompt-reading stage takes media itself: vLLM gets checked, inline parts."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.entrypoints.openai.http_rig import (
    Rig,
    TextParts,
    audio_part,
    serving,
    speaking_pipeline,
    wav_base64,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.chat import serving as chat_serving


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    pipeline = speaking_pipeline()
    asr, thinker, voice = pipeline.stages
    reads = frozenset({Modality.AUDIO, Modality.IMAGE})
    thinker = dataclasses.replace(thinker, accepts=reads)
    native = dataclasses.replace(
        pipeline, stages=(asr, thinker, voice), edges=pipeline.edges[1:], placeholders={}
    )
    limits = ServerLimits(media_fetch="public", max_audio_bytes=10_000)
    async with serving(text_parts, pipeline=native, limits=limits) as rig:
        yield rig


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies that reach vLLM's request model."""
    seen: list[dict[str, Any]] = []
    original = chat_serving.parse_model

    def noted(model: Any, body: dict[str, Any]) -> Any:
        seen.append(body)
        return original(model, body)

    monkeypatch.setattr(chat_serving, "parse_model", noted)
    return seen


@pytest.mark.parametrize("is_file", [False, True])
async def test_vllm_sees_a_handle_in_the_place_of_audio(
    rig: Rig, parsed: list[dict[str, Any]], is_file: bool
) -> None:
    data = wav_base64(160)
    given = {"type": "file", "file": {"file_data": f"data:audio/wav;base64,{data}"}}

    response = await rig.chat(content=[given if is_file else audio_part(data)])

    # The tiny model of this test reads text only: vLLM says so, which shows that it was asked.
    assert response.status_code == 400
    (part,) = parsed[0]["messages"][0]["content"]
    assert part["type"] == "audio_url"
    assert part["audio_url"]["url"].startswith("omni-media:")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (audio_part(wav_base64(9000)), "messages[0].content[0].input_audio.data"),
        (
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}},
            "messages[0].content[0].image_url.url",
        ),
        ({"image_url": "http://169.254.169.254/x.png"}, "messages[0].content[0].image_url"),
        (
            {"type": "input_image", "image_url": "http://10.0.0.1/x.png"},
            "messages[0].content[0].image_url",
        ),
        (
            {"type": "image_url", "image_url": {"url": "omni-media:guess/0"}},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:audio/wav;base64,AAAA"}},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"type": "file", "file": {"file_data": f"data:audio/wav;base64,{wav_base64(9000)}"}},
            "messages[0].content[0].file.file_data",
        ),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, None),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, None),
        ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[0]"),
        (
            {"type": "text", "text": "x", "uuid": "u", "image_url": "http://10.0.0.1/x.png"},
            "messages[0].content[0].uuid",
        ),
        ({**audio_part(wav_base64(160)), "uuid": "u"}, "messages[0].content[0].uuid"),
    ],
)
async def test_vllm_is_given_nothing_unchecked(
    rig: Rig, parsed: list[dict[str, Any]], part: dict[str, Any], param: str | None
) -> None:
    response = await rig.chat(content=[part])

    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param
    assert response.json()["error"]["param"].startswith("messages[0].content[0]")
    assert parsed == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mm_processor_kwargs": {"fps": 30}}, "mm_processor_kwargs.fps"),
        (
            # The pipeline of this test reads no video.
            {"mm_processor_kwargs": {"use_audio_in_video": True}},
            "mm_processor_kwargs.use_audio_in_video",
        ),
        ({"media_io_kwargs": {"video": {"num_frames": 9}}}, "media_io_kwargs"),
    ],
)
async def test_a_client_does_not_steer_how_media_are_read(
    rig: Rig, options: dict[str, Any], param: str
) -> None:
    response = await rig.chat(**options)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
