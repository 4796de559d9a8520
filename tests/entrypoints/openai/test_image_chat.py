"""Chats with a picture model: a message in, pictures as the content of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.http_rig import TextParts, parse_events
from tests.entrypoints.openai.picture_rig import (
    MODEL,
    SIZE,
    PictureRig,
    data_url,
    opened,
    picture_server,
    png,
)


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[PictureRig]:
    async with picture_server(text_parts.args) as rig:
        yield rig


async def chat(rig: PictureRig, content: object = "a fox", **fields: object) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    return await rig.http.post("/v1/chat/completions", json=body)


def picture_of(content: list[dict[str, Any]]) -> Any:
    kind, _, data = content[0]["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png"
    return opened(data)


async def test_the_answer_holds_a_picture_as_a_data_url(rig: PictureRig) -> None:
    answer = (await chat(rig, modalities=["image"], seed=6)).json()

    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert picture_of(choice["message"]["content"]).getpixel((0, 0))[0] == 6
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


async def test_pictures_in_the_message_are_what_it_starts_from(rig: PictureRig) -> None:
    parts = [
        {"type": "text", "text": "make it blue"},
        {"type": "image_url", "image_url": {"url": data_url(png(24, 16))}},
    ]

    await chat(rig, parts, size="64x64", num_inference_steps=2)

    wanted = rig.requested
    assert wanted.prompt == "make it blue"
    assert wanted.images[0].shape == (16, 24, 3)
    assert (wanted.width, wanted.num_inference_steps) == (64, 2)


async def test_choices_are_pictures_of_their_own(rig: PictureRig) -> None:
    choices = (await chat(rig, n=2, seed=30)).json()["choices"]

    reds = [picture_of(one["message"]["content"]).getpixel((0, 0))[0] for one in choices]
    assert reds == [30, 31]


async def test_a_stream_ends_with_usage_and_done(rig: PictureRig) -> None:
    response = await chat(rig, stream=True, stream_options={"include_usage": True})

    *chunks, done = parse_events(response.text)
    choice = chunks[0]["choices"][0]
    assert done == "[DONE]"
    assert picture_of(choice["delta"]["content"]).size == (SIZE, SIZE)
    assert choice["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text"]}, "modalities"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"temperature": 0.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool": 1}]}, "messages[0].tool"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": " "}]}, "prompt"),
        ({"size": "33x32"}, "size"),
    ],
)
async def test_refusals_name_the_field(rig: PictureRig, fields: dict[str, Any], param: str) -> None:
    response = await chat(rig, **fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not rig.replica.added


async def test_a_picture_on_a_network_address_is_not_fetched(rig: PictureRig) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}]

    response = await chat(rig, [{"type": "text", "text": "x"}, *parts])

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url.url"
