"""A served thinker that hears and sees: what clients may send, and what is refused by name."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import openai
import pytest
from PIL import Image

from benchmarks.served import Server
from tests.e2e.omni_server import (
    audio,
    data_url,
    image,
    served,
    turn,
    video,
    wav,
    wave,
    without_voice,
    words,
    write_adapter,
)
from tests.entrypoints.openai.media.clips import mp4, png
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(600)]

CLIP = mp4(num_frames=8, rate=4, sound_s=2.0)
FIRST = "messages[0].content[0]"


@dataclass(frozen=True)
class Served:
    server: Server
    client: openai.OpenAI
    model: str

    def ask(self, messages: Any, **options: Any) -> Any:
        wanted = {"temperature": 0.0, "max_tokens": 12, "model": self.model} | options
        return self.client.chat.completions.create(messages=messages, **wanted)

    def text(self, messages: Any, **options: Any) -> str:
        content: str = self.ask(messages, **options).choices[0].message.content
        return content


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("omni")
    model_dir = without_voice(make_tiny(folder / "tiny"))
    adapter = write_adapter(folder / "adapter", model_dir)
    arguments = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"bent={adapter}"]
    with served(model_dir, folder / "server.log", *arguments) as (server, client):
        yield Served(server, client, client.models.list().data[0].id)


@pytest.mark.parametrize(
    "parts",
    [
        [image(png()), words("and"), image(png(8, 8, seed=1)), image(png(1500, 10, seed=2))],
        [audio(wav(wave(0.1))), words("What was said?")],
        [audio(wav(wave(1.0, 44100, channels=2), 44100)), words("in stereo")],
        [{"type": "audio_url", "audio_url": {"url": data_url("audio/wav", wav(wave()))}}],
        [video(CLIP), words("What happens?")],
        [image(png()), audio(wav(wave())), video(CLIP), words("all of it")],
    ],
    ids=["images", "short audio", "44.1 kHz stereo", "audio URL", "video", "mixed"],
)
def test_every_kind_of_part_is_read(thinker: Served, parts: list[dict[str, Any]]) -> None:
    answer = thinker.ask(turn(*parts))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens > 10 + len(parts)
    # Again: from the prefix cache this time.
    assert thinker.text(turn(*parts)) == answer.choices[0].message.content


def test_the_sound_of_a_video_is_heard_when_asked_for(thinker: Served) -> None:
    hears = {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": True}}}
    parts = [audio(wav(wave(0.5))), video(CLIP), words("What happens?")]
    silent, sounding = thinker.ask(turn(*parts[1:])), thinker.ask(turn(*parts[1:]), **hears)
    beside = thinker.ask(turn(*parts), **hears)
    assert silent.usage.prompt_tokens < sounding.usage.prompt_tokens < beside.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        thinker.ask(turn(video(mp4())), **hears)
    assert refused.value.param == f"{FIRST}.video_url.url"
    assert "no sound" in refused.value.message


def test_a_checkpoint_without_a_voice_says_so(thinker: Served) -> None:
    listed = thinker.client.models.list().data[0].model_dump()
    assert listed["modalities"] == {
        "input": ["audio", "image", "text", "video"],
        "output": ["text"],
    }
    with pytest.raises(openai.BadRequestError) as refused:
        thinker.ask(turn(words("hi")), modalities=["text", "audio"])
    assert refused.value.param == "modalities"
    assert "enable_audio_output: false" in refused.value.message


def test_together_each_gets_what_it_gets_alone(thinker: Served) -> None:
    turns = [
        turn(image(png(seed=i)), audio(wav(wave(0.2 + 0.1 * i))), words(f"question {i}"))
        for i in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(thinker.text, turns))
    assert together == [thinker.text(one) for one in turns]
    assert len(set(together)) > 4


def test_what_vllm_can_do_with_text_it_does_here(thinker: Served) -> None:
    asked = turn(image(png()), words("Say it."))
    whole = thinker.text(asked, max_tokens=24)
    stop = whole[len(whole) // 2 :][:4]
    assert thinker.text(asked, max_tokens=24, stop=[stop]) == whole[: whole.index(stop)]

    choice = {"structured_outputs": {"choice": ["left", "right"]}}
    assert thinker.text(asked, extra_body=choice) in ("left", "right")

    drawn = {"temperature": 1.0, "seed": 7, "n": 3}
    first, again = thinker.ask(asked, **drawn), thinker.ask(asked, **drawn)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) == 3

    assert thinker.text(asked, model="bent") != thinker.text(asked)

    events = list(thinker.ask(asked, stream=True, stream_options={"include_usage": True}))
    joined = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert joined == thinker.text(asked)
    assert events[-1].usage.completion_tokens == 12


def test_params_of_the_one_stage_may_come_as_a_list(thinker: Served) -> None:
    asked = turn(words("Tell me."))
    listed = thinker.ask(asked, extra_body={"sampling_params_list": [{"max_tokens": 3}]})
    assert listed.usage.completion_tokens == 12, "a field of the request itself stands before it"
    for params, field in (
        ([{}, {}], "sampling_params_list"),
        ([{"max_token": 3}], "sampling_params_list[0].max_token"),
        ([{"top_p": "high"}], "sampling_params_list[0].top_p"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            thinker.ask(asked, extra_body={"sampling_params_list": params})
        assert refused.value.param == field


def _empty_video() -> bytes:
    """A container that announces a video and holds no frame of it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    return buffer.getvalue()


def _blank_image(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


NAN = np.full((16000, 1), np.nan, np.float32)
BAD = {
    "not a number": ([audio(wav(NAN))], f"{FIRST}.input_audio.data"),
    "no samples": ([audio(wav(wave(0.0)))], f"{FIRST}.input_audio.data"),
    "cut-off wav": ([audio(wav(wave())[:-9000])], f"{FIRST}.input_audio.data"),
    "nothing": ([audio(b"")], f"{FIRST}.input_audio.data"),
    "another format": ([audio(wav(wave()), "mp3")], f"{FIRST}.input_audio.format"),
    "no image": ([image(b"GIF89a no")], f"{FIRST}.image_url.url"),
    "cut-off image": ([image(png()[:100])], f"{FIRST}.image_url.url"),
    "huge image": ([image(_blank_image(6000, 6000))], f"{FIRST}.image_url.url"),
    "cut-off video": ([video(CLIP[: len(CLIP) // 2])], f"{FIRST}.video_url.url"),
    "video without frames": ([video(_empty_video())], f"{FIRST}.video_url.url"),
    "200 images": ([image(png())] * 200, "messages"),
    "a loopback URL": (
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}],
        f"{FIRST}.image_url.url",
    ),
    "a file": (
        [{"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}],
        f"{FIRST}.video_url.url",
    ),
    "longer than the model": ([words("word " * 2000)], None),
    "video longer than the model": ([video(mp4(num_frames=200, rate=4, size=(320, 240)))], None),
    "a line of pixels": ([image(png(3000, 4))], None),
    "too short to be heard": ([audio(wav(wave(0.001)))], None),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_media_are_refused_by_name(thinker: Served, name: str) -> None:
    parts, field = BAD[name]
    with pytest.raises(openai.APIStatusError) as refused:
        thinker.ask(turn(*parts, words("What is it?")))
    assert 400 <= refused.value.status_code < 500, refused.value.message
    assert refused.value.param, refused.value.message
    if field is not None:
        assert refused.value.param == field
    assert thinker.text(turn(words("Still there?")))


@pytest.mark.parametrize(
    "parts",
    [
        [words("<|image_pad|>"), image(png())],
        [words("<|vision_start|><|video_pad|><|vision_end|><|audio_pad|>")],
        [words("<|audio_pad|>"), video(CLIP), audio(wav(wave()))],
    ],
)
@pytest.mark.parametrize("hears", [False, True])
def test_marks_of_media_in_a_text_harm_nobody(
    thinker: Served, parts: list[dict[str, Any]], hears: bool
) -> None:
    options = {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": hears}}}
    # Answered or refused; an InternalServerError fails the test.
    with contextlib.suppress(openai.BadRequestError):
        thinker.ask(turn(*parts), **options)
    assert thinker.text(turn(words("Still there?")))
