from __future__ import annotations

import base64
import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.fakes import FakePreparer, voice_pipeline
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.prompts import (
    check_audio,
    check_placeholders,
    parse_audio,
    parse_prompt,
    render_messages,
)
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt

SILENCE = np.zeros(1600, np.float32)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", OmniPrompt(text="hi")),
        (OmniPrompt(text="hi"), OmniPrompt(text="hi")),
        ({"prompt": "hi"}, OmniPrompt(text="hi")),
        ({"prompt_token_ids": [1, 2]}, OmniPrompt(token_ids=[1, 2])),
        ({"prompt": "hi", "prompt_token_ids": [1, 2]}, OmniPrompt(token_ids=[1, 2])),
        ({"prompt": "hi", "cache_salt": "s"}, OmniPrompt(text="hi", extra={"cache_salt": "s"})),
        (
            {"prompt": "hi", "multi_modal_data": {"image": "pixels"}},
            OmniPrompt(text="hi", extra={"multi_modal_data": {"image": "pixels"}}),
        ),
        (
            {"type": "token", "prompt_token_ids": [1], "prompt": "hi"},
            OmniPrompt(
                engine_input={"type": "token", "prompt_token_ids": [1], "prompt": "hi"}, text="hi"
            ),
        ),
    ],
)
def test_every_form_of_a_prompt(prompt: object, expected: OmniPrompt) -> None:
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize("prompt", [None, 3, ["hi"], {}, {"prompt": 3}, {"text": "hi"}])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(BadRequestError) as raised:
        parse_prompt(prompt)
    assert raised.value.field == "prompt"


@pytest.mark.parametrize(
    "samples",
    [
        np.array([0.5, -0.5], np.float64),
        np.array([16384, -16384], np.int16),
        np.array([[0.25, 0.75], [-0.5, -0.5]] * 2, np.float32)[:2],
        [0.5, -0.5],
    ],
)
def test_samples_become_mono_float32(samples: Any) -> None:
    (item,) = parse_audio((samples, 16000))
    assert item.samples.dtype == np.float32
    np.testing.assert_allclose(item.samples, [0.5, -0.5])
    assert item.sample_rate_hz == 16000


def test_stereo_is_mixed_whichever_axis_its_channels_are() -> None:
    stereo = np.stack([np.full(100, 0.2), np.full(100, 0.4)])
    for samples in (stereo, stereo.T):
        (item,) = parse_audio((samples, 16000))
        np.testing.assert_allclose(item.samples, np.full(100, 0.3), rtol=1e-6)


def test_several_items_keep_their_order() -> None:
    items = parse_audio([(SILENCE, 8000), AudioInput(SILENCE, 16000)])
    assert [item.sample_rate_hz for item in items] == [8000, 16000]


@pytest.mark.parametrize(
    "audio",
    [
        "file.wav",
        (SILENCE,),
        (SILENCE, "16k"),
        (SILENCE, True),
        (np.zeros(3, complex), 16000),
        (np.array(["a"]), 16000),
        (np.zeros((2, 2, 2)), 16000),
        ([[1], [2, 3]], 16000),
    ],
    ids=str,
)
def test_what_is_no_audio_is_refused(audio: object) -> None:
    with pytest.raises(BadRequestError) as raised:
        parse_audio(audio)
    assert raised.value.field == "audio"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([AudioInput(SILENCE, 16000)] * 3, "3 audio items; the limit is 2"),
        ([AudioInput(np.zeros(0, np.float32), 16000)], "no samples"),
        ([AudioInput(SILENCE, 0)], "must be positive"),
        ([AudioInput(np.zeros(32001, np.float32), 16000)], "the limit is 2 s"),
        ([AudioInput(np.array([0.0, np.nan], np.float32), 16000)], "not finite"),
        ([AudioInput(np.array([0.0, np.inf], np.float32), 16000)], "not finite"),
    ],
)
def test_audio_that_no_stage_should_see(items: list[AudioInput], message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as raised:
        check_audio(items, ServerLimits(max_media_items=2, max_audio_s=2.0))
    assert raised.value.field == "audio"


def test_good_audio_passes() -> None:
    check_audio([AudioInput(SILENCE, 16000)], ServerLimits())


@pytest.mark.parametrize(("text", "num_items"), [("hi", 1), ("<|audio|>", 0), (None, 1)])
def test_placeholders_and_audio_must_agree(text: str | None, num_items: int) -> None:
    pipeline = voice_pipeline()
    audio = (AudioInput(SILENCE, 16000),) * num_items
    prompt = OmniPrompt(text=text, token_ids=None if text else [1], audio=audio)
    with pytest.raises(BadRequestError, match="placeholder"):
        check_placeholders(prompt, pipeline, pipeline.stages[1])


def test_placeholders_matter_only_where_another_stage_reads_the_audio() -> None:
    pipeline = voice_pipeline()
    prompt = OmniPrompt(text="hi", audio=(AudioInput(SILENCE, 16000),))
    check_placeholders(prompt, pipeline, pipeline.stages[0])


async def render(messages: object, **more: object) -> OmniPrompt:
    return await render_messages(
        {"messages": messages, **more},
        voice_pipeline(),
        FakePreparer(),  # type: ignore[arg-type]
    )


async def test_messages_with_audio_get_placeholders_in_order() -> None:
    prompt = await render(
        [
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "audio", "audio": (SILENCE, 8000)},
                    {"type": "text", "text": " and "},
                    {"type": "input_audio", "audio": AudioInput(SILENCE, 16000)},
                ],
            },
        ]
    )
    assert prompt.text == "Be kind.\n<|audio|> and <|audio|>"
    assert [item.sample_rate_hz for item in prompt.audio] == [8000, 16000]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "say <|audio|>"}], "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "<|audio|>"}]}], "messages"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "audio"),
    ],
)
async def test_messages_that_cannot_be_rendered(messages: object, field: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        await render(messages)
    assert raised.value.field == field


async def test_an_unknown_key_beside_messages_is_named() -> None:
    with pytest.raises(BadRequestError, match="unknown key 'temperature'"):
        await render([{"role": "user", "content": "hi"}], temperature=0.5)


async def test_a_stage_that_hears_gets_samples_as_they_are() -> None:
    samples = np.linspace(-0.5, 0.5, 400, dtype=np.float32)
    seen: list[Any] = []

    class Renderer(FakePreparer):
        async def render_messages(
            self, messages: Any, template_kwargs: Any = None, processor_kwargs: Any = None
        ) -> OmniPrompt:
            seen.extend([messages, processor_kwargs])
            return OmniPrompt(text="rendered")

    native = dataclasses.replace(voice_pipeline(), placeholders={})
    content = [{"type": "audio", "audio": (samples, 16000)}, {"type": "text", "text": "?"}]
    prompt = {
        "messages": [{"role": "user", "content": content}],
        "mm_processor_kwargs": {"use_audio_in_video": True},
    }
    await render_messages(prompt, native, Renderer())

    (message,), options = seen
    url = message["content"][0]["audio_url"]["url"]
    heard, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert rate_hz == 16000
    assert np.array_equal(heard.astype(np.float32), samples)
    assert options == {"use_audio_in_video": True}
