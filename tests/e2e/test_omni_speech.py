"""Both speaking families behind `vllm serve`, asked for text and speech by the official client."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image

from benchmarks.served import Server
from tests.e2e.omni_server import audio, image, served, turn, wav, wave, words
from tests.entrypoints.openai.media.clips import png
from tests.fakes import eventually
from tests.parity.omni_prompts import NUM_TOKENS, Question
from tests.parity.qwen2_5_omni.reference import spoken_at_once
from tests.parity.speech import Speaker, Spoken
from tests.parity.vocoders import Samples
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny as make_qwen2_5
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny as make_qwen3

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    model_class: str
    vocoder: str
    voice: str
    frames: int
    """What the talker is let speak: more than the vocoder's first chunk."""
    frame_samples: int


FAMILIES = {
    "qwen3": Family(
        make_qwen3, "Qwen3OmniMoeForConditionalGeneration", "code2wav", "ethan", 12, 1920
    ),
    "qwen2.5": Family(
        make_qwen2_5, "Qwen2_5OmniForConditionalGeneration", "token2wav", "Chelsie", 80, 480
    ),
}
ASKED = turn(image(png()), audio(wav(wave(0.5))), words("What is this?"))
BOTH = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}


@dataclass(frozen=True)
class Speaking:
    model_dir: Path
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
        (found,) = self.series(rf'requests_submitted_total{{stage="{stage}"}}')
        return found

    def in_flight(self) -> float:
        """Requests that are in a stage."""
        return sum(self.series(r"requests_in_flight{.*}"))

    def series(self, pattern: str) -> list[float]:
        shown = self.server.get("/metrics").decode()
        return [float(value) for value in re.findall(rf"vllm_omni_{pattern} (\S+)", shown)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def speaking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speaking]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("omni")
    model_dir = family.make(folder / "tiny")
    with served(model_dir, folder / "server.log") as (server, client):
        yield Speaking(model_dir, server, client, family)


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


def reference_sound(speaker: Speaker, spoken: Spoken, voice: str, seed: int) -> Samples:
    """What transformers' vocoder makes of the reference's codes."""
    if not hasattr(speaker.model.talker, "code_predictor"):
        codes = np.array(spoken.codes, np.int32)[:, None]
        voices = torch.load(speaker.model_dir / "spk_dict.pt", weights_only=True)
        return spoken_at_once(speaker.model.token2wav, codes, voices[voice], seed=seed)
    frames = torch.tensor(spoken.codes).reshape(1, -1, 16).transpose(1, 2)
    with torch.inference_mode():
        wave: Samples = speaker.model.code2wav.chunked_decode(frames).numpy().reshape(-1)
    return wave


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_written_and_heard_is_the_reference_s(speaking: Speaking, is_stream: bool) -> None:
    """Through all stages, over HTTP: the words, and the samples as 16 bit."""
    family, seed, num_frames = speaking.family, 5, 12
    speaker = Speaker(speaking.model_dir, family.model_class)
    picture = Image.open(io.BytesIO(png())).convert("RGB")
    parts = ({"type": "image"}, {"type": "audio"}, words("What is this?"))
    question = Question(parts, images=(picture,), audio=(wave(0.5)[:, 0],))
    _, written = speaker.answer(question)
    spoken = speaker.speak(question, written, 6, num_frames, speaker=family.voice)
    expected = reference_sound(speaker, spoken, family.voice, seed)
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0}
    answer = speaking.ask(
        modalities=["text", "audio"],
        audio={"voice": family.voice, "format": "pcm16"},
        max_tokens=NUM_TOKENS,
        seed=seed,
        stream=is_stream,
        extra_body={
            **greedy,
            "stop_token_ids": [spoken.end_token],
            "sampling_params_list": [None, {**greedy, "max_tokens": num_frames}, None],
        },
    )
    text, heard = joined(answer) if is_stream else whole(answer)

    assert text == tokenizer_of(speaking.model_dir).decode(spoken.reply, skip_special_tokens=True)
    assert expected.std() > 0.003, "the reference is silent"
    # transformers drops the frame with which a talker of several codes reaches its limit.
    assert expected.size <= heard.size <= expected.size + family.frame_samples
    assert np.abs(heard[: expected.size] / 32768 - expected.clip(-1, 1)).max() < 3e-4


def whole(answer: Any) -> tuple[str, Any]:
    return whole_of(answer.choices[0].message)


def whole_of(message: Any) -> tuple[str, Any]:
    return message.content, samples(message.audio.data)


def joined(events: Any, index: int = 0) -> tuple[str, Any]:
    choices = [choice for event in events for choice in event.choices]
    deltas = [choice.delta for choice in choices if choice.index == index]
    sounds = [getattr(delta, "audio", None) for delta in deltas]
    heard = b"".join(base64.b64decode(one.data) for one in sounds if one and one.data)
    return "".join(delta.content or "" for delta in deltas), np.frombuffer(heard, "<i2")


def tokenizer_of(model_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_dir)


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


def test_eight_together_hear_what_each_hears_alone(speaking: Speaking) -> None:
    voices = speaking.client.models.list().data[0].model_dump()["voices"]

    def answered(i: int) -> tuple[str, Any]:
        parts = [image(png(seed=i)), audio(wav(wave(0.2 + 0.1 * i)))][: i % 3]
        spoken = {"voice": voices[i % len(voices)], "format": "pcm16"}
        asked = turn(*parts, words(f"question {i}"))
        return whole(speaking.ask(asked, modalities=["text", "audio"], audio=spoken, seed=i))

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(answered, range(8)))
    for i, (text, heard) in enumerate(together):
        alone, heard_alone = answered(i)
        assert text == alone, i
        assert heard.size == heard_alone.size > 0, i
        # A batched matrix product sums in another order.
        assert np.abs(heard.astype(int) - heard_alone).max() <= 8, i
    assert len({text for text, _ in together}) > 4


def test_every_choice_has_its_own_words_and_sound(speaking: Speaking) -> None:
    drawn = {"temperature": 1.0, "seed": 3, **BOTH}
    choices = speaking.ask(n=2, **drawn).choices
    first, second = [whole_of(choice.message) for choice in choices]
    assert first[0] != second[0]
    assert first[1].any()
    assert second[1].any()
    events = list(speaking.ask(n=2, stream=True, **drawn))
    for index, (text, heard) in enumerate((first, second)):
        streamed = joined(events, index)
        assert streamed[0] == text
        assert np.array_equal(streamed[1], heard)


async def test_who_leaves_leaves_nothing_behind(speaking: Speaking) -> None:
    params = {"sampling_params_list": [None, {"max_tokens": 2000}, None]}
    long = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True, **params}}
    for num_events in (1, 2, 5, 20):
        events = speaking.ask(**long, **BOTH)
        for _ in zip(range(num_events), events, strict=False):
            pass
        events.close()
    assert speaking.ask(**BOTH).choices[0].message.audio
    await eventually(lambda: speaking.in_flight() == 0, timeout_s=20.0)


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
