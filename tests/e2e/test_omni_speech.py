"""Both speaking families behind `vllm serve`, asked for text and speech by the official client."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from benchmarks.served import Server
from tests.e2e.omni_server import audio, image, served, turn, wav, wave, words
from tests.entrypoints.openai.media.clips import png
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny as make_qwen2_5
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny as make_qwen3

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    vocoder: str
    voice: str
    frames: int
    """What the talker is let speak: more than the vocoder's first chunk."""
    frame_samples: int


FAMILIES = {
    "qwen3": Family(make_qwen3, "code2wav", "ethan", 12, 1920),
    "qwen2.5": Family(make_qwen2_5, "token2wav", "Chelsie", 80, 480),
}
ASKED = turn(image(png()), audio(wav(wave(0.5))), words("What is this?"))
BOTH = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}


@dataclass(frozen=True)
class Speaking:
    server: Server
    client: openai.OpenAI
    family: Family

    def ask(self, messages: Any = ASKED, **options: Any) -> Any:
        listed = [None, {"temperature": 0.0, "max_tokens": self.family.frames}, None]
        wanted = {
            "model": self.client.models.list().data[0].id,
            "temperature": 0.0,
            "max_tokens": 10,
            "extra_body": {"sampling_params_list": listed},
        }
        return self.client.chat.completions.create(messages=messages, **(wanted | options))

    def submitted(self, stage: str) -> float:
        """Requests that a stage was given, by the server's own count."""
        series = self.server.get("/metrics").decode()
        pattern = rf'vllm_omni_requests_submitted_total{{stage="{stage}"}} (\S+)'
        found = re.search(pattern, series)
        assert found is not None
        return float(found[1])


@pytest.fixture(scope="module", params=list(FAMILIES))
def speaking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speaking]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("omni")
    with served(family.make(folder / "tiny"), folder / "server.log") as (server, client):
        yield Speaking(server, client, family)


def samples(data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), "<i2")


def test_a_whole_answer_is_text_and_speech(speaking: Speaking) -> None:
    answer = speaking.ask(**BOTH)
    message = answer.choices[0].message
    assert message.content
    assert message.audio.transcript == message.content
    heard = samples(message.audio.data)
    family = speaking.family
    assert 0 < heard.size <= family.frames * family.frame_samples
    assert heard.any()
    assert answer.usage.completion_tokens == 10, "the thinker's tokens alone are counted"


def test_text_and_speech_come_in_one_stream(speaking: Speaking) -> None:
    whole = speaking.ask(**BOTH)
    events = list(speaking.ask(stream=True, stream_options={"include_usage": True}, **BOTH))
    deltas = [choice.delta for event in events for choice in event.choices]
    sounds = [getattr(delta, "audio", None) for delta in deltas]
    parts = [base64.b64decode(sound.data) for sound in sounds if sound and sound.data]
    heard = b"".join(parts)
    assert heard == base64.b64decode(whole.choices[0].message.audio.data)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert len(parts) > 1, "the sound comes in pieces"
    assert events[-1].usage == whole.usage
    assert [c.finish_reason for e in events for c in e.choices if c.finish_reason] == ["length"]


def test_who_wants_text_troubles_the_thinker_alone(speaking: Speaking) -> None:
    stages = ("thinker", "talker", speaking.family.vocoder)
    before = [speaking.submitted(stage) for stage in stages]
    answer = speaking.ask(extra_body={})
    assert answer.choices[0].message.content
    assert answer.choices[0].message.audio is None
    after = [speaking.submitted(stage) for stage in stages]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0]


def test_voices_are_those_of_the_checkpoint(speaking: Speaking) -> None:
    listed = speaking.client.models.list().data[0].model_dump()["voices"]
    assert listed[0] == "default"
    assert speaking.family.voice in listed
    named = speaking.ask(
        modalities=["audio"], audio={"voice": speaking.family.voice.upper(), "format": "pcm16"}
    )
    assert named.choices[0].message.content is None
    assert samples(named.choices[0].message.audio.data).any()
    with pytest.raises(openai.BadRequestError) as refused:
        speaking.ask(modalities=["audio"], audio={"voice": "nobody", "format": "wav"})
    assert refused.value.param == "audio.voice"
    assert all(voice in refused.value.message for voice in listed)


def test_every_stage_has_its_own_params(speaking: Speaking) -> None:
    def length(frames: int) -> int:
        params = [None, {"temperature": 0.0, "max_tokens": frames}, None]
        answer = speaking.ask(extra_body={"sampling_params_list": params}, **BOTH)
        return int(samples(answer.choices[0].message.audio.data).size)

    frames = speaking.family.frames
    assert length(frames // 3) < length(frames)
    for params, field in (
        ([None, None], "sampling_params_list"),
        ([None, {"max_frames": 3}, None], "sampling_params_list[1].max_frames"),
        ([None, {"top_p": 7}, None], "sampling_params_list[1].top_p"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            speaking.ask(extra_body={"sampling_params_list": params}, **BOTH)
        assert refused.value.param == field


def test_a_seed_makes_the_same_sound_again(speaking: Speaking) -> None:
    params = [None, {"max_tokens": speaking.family.frames}, None]

    def sound(seed: int) -> str:
        extra = {"sampling_params_list": params}
        data: str = speaking.ask(seed=seed, extra_body=extra, **BOTH).choices[0].message.audio.data
        return data

    assert sound(1) == sound(1)
    assert sound(1) != sound(2)
