"""A pipeline whose prompt-reading stage takes media itself: vLLM gets checked, inline parts."""

from __future__ import annotations

import base64
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
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher

WAV = base64.b64decode(wav_base64(160))


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


async def test_audio_parts_reach_vllm_as_they_are(rig: Rig, parsed: list[dict[str, Any]]) -> None:
    part = audio_part(wav_base64(160))
    response = await rig.chat(content=[part])

    # The tiny model of this test reads text only: vLLM says so, which shows that it was asked.
    assert response.status_code == 400
    assert parsed[0]["messages"][0]["content"] == [part]


async def test_what_a_url_names_is_fetched_here(
    rig: Rig, parsed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(self: MediaFetcher, url: str, max_bytes: int, field: str) -> bytes:
        assert (url, max_bytes) == ("https://media.example/a.wav", 10_000)
        return WAV

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    url = {"url": "https://media.example/a.wav"}
    await rig.chat(content=[{"type": "audio_url", "audio_url": url}])

    (part,) = parsed[0]["messages"][0]["content"]
    assert part["audio_url"]["url"] == f"data:audio/wav;base64,{base64.b64encode(WAV).decode()}"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (audio_part("%%%%"), "messages[0].content[0].input_audio.data"),
        (audio_part(wav_base64(9000)), "messages[0].content[0].input_audio.data"),
        (
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}},
            "messages[0].content[0].image_url.url",
        ),
        ({"image_url": "http://169.254.169.254/x.png"}, "messages[0].content[0].image_url"),
    ],
)
async def test_vllm_is_given_nothing_unchecked(
    rig: Rig, parsed: list[dict[str, Any]], part: dict[str, Any], param: str
) -> None:
    response = await rig.chat(content=[part])

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert parsed == []
