"""Every field of every request with every wrong type: a refusal or an answer, never a 500."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest
import pytest_asyncio
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.entrypoints.openai.http_rig import (
    MODEL,
    Rig,
    TextParts,
    answers,
    audio_part,
    say,
    serving,
    wav_base64,
)
from vllm_omni.entrypoints.openai import serving as serving_module
from vllm_omni.entrypoints.openai.chat.protocol import OmniChatRequest
from vllm_omni.entrypoints.openai.speech.protocol import SpeechRequest

WRONG: Final[list[object]] = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "\u0000\ud7ff",
    [],
    [None],
    ["a", 1],
    {},
    {"a": {"b": [1]}},
]
CHAT: Final = say(
    content=[{"type": "text", "text": "hi"}, audio_part(wav_base64(160))],
    modalities=["text", "audio"],
    audio={"voice": "default", "format": "wav"},
)

PICTURE: Final = "data:image/png;base64,AAAA"
RESPONSE: Final[dict[str, Any]] = {
    "model": MODEL,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 3,
}
MESSAGES: Final[dict[str, Any]] = {
    "model": MODEL,
    "max_tokens": 3,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "4"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                },
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 10},
}


def paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], new: object) -> Any:
    """A copy of a JSON value with one place replaced."""
    if not path:
        return new
    head, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[head] = replaced(value[head], tuple(rest), new)
    return copy


async def send(rig: Rig, url: str, body: object) -> None:
    response = await rig.http.post(url, json=body)
    assert response.status_code < 500 or response.status_code == 501, (body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        # The other API has no codes.
        assert isinstance(error["type" if url == "/v1/messages" else "code"], str), error
        assert error["message"]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts) as rig:
        rig.asr.script = answers("words")
        yield rig


@pytest.mark.parametrize("field", sorted({*OmniChatRequest.model_fields, "metadata", "store"}))
async def test_chat_fields(rig: Rig, field: str) -> None:
    for wrong in WRONG:
        await send(rig, "/v1/chat/completions", {**say(), field: wrong})


async def test_every_place_of_a_spoken_chat(rig: Rig) -> None:
    for path in list(paths(CHAT)):
        for wrong in WRONG:
            await send(rig, "/v1/chat/completions", replaced(CHAT, path, wrong))


@pytest.mark.parametrize("field", sorted(CompletionRequest.model_fields))
async def test_completion_fields(rig: Rig, field: str) -> None:
    for wrong in WRONG:
        await send(rig, "/v1/completions", {"prompt": "hi", field: wrong})


@pytest.mark.parametrize("field", sorted({*ResponsesRequest.model_fields, "messages"}))
async def test_response_fields(rig: Rig, field: str) -> None:
    for wrong in WRONG:
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 3, field: wrong}
        await send(rig, "/v1/responses", body)


@pytest.mark.parametrize("field", sorted({*AnthropicMessagesRequest.model_fields, "n"}))
async def test_message_fields(rig: Rig, field: str) -> None:
    for wrong in WRONG:
        await send(rig, "/v1/messages", {**say(max_tokens=3), field: wrong})


@pytest.mark.parametrize(("url", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGES)])
async def test_every_place_of_the_other_chats(rig: Rig, url: str, body: dict[str, Any]) -> None:
    for path in list(paths(body)):
        for wrong in WRONG:
            await send(rig, url, replaced(body, path, wrong))


@pytest.mark.parametrize("field", sorted({*SpeechRequest.model_fields, "extra"}))
async def test_speech_fields(rig: Rig, field: str) -> None:
    for wrong in WRONG:
        await send(rig, "/v1/audio/speech", {"input": "Hello.", field: wrong})


@pytest.mark.parametrize(
    "url", ["/v1/chat/completions", "/v1/completions", "/v1/audio/speech", "/v1/responses"]
)
async def test_bodies_that_are_no_object(rig: Rig, url: str) -> None:
    headers = {"content-type": "application/json"}
    for wrong in WRONG:
        if not isinstance(wrong, dict):
            await send(rig, url, wrong)
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1}x', b"NaN"):
        response = await rig.http.post(url, content=raw, headers=headers)
        assert response.status_code == 400, (raw[:20], response.text)
        assert isinstance(response.json()["error"]["code"], str)


MANY: Final = b",".join(b'"k%d":1' % i for i in range(3_000_000))


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"hi"}],'),
        ("/v1/completions", b'{"prompt":"hi",'),
        ("/v1/audio/speech", b'{"input":"Hello.",'),
        ("/v1/responses", b'{"model":"tiny","input":"hi",'),
        ("/tokenize", b'{"prompt":"hi",'),
        ("/v1/systemone", b'{"state":"hi","questions":{},'),
    ],
)
@pytest.mark.parametrize("form", ["fields", "a few more", "inside", "list"])
async def test_millions_of_values_reach_no_validator(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, url: str, start: bytes, form: str
) -> None:
    validated: list[object] = []

    def validate(*args: object, **kwargs: object) -> None:
        validated.append(args)

    monkeypatch.setattr(serving_module, "parse_model", validate)
    monkeypatch.setattr(BaseModel, "model_validate", validate)
    body = {
        "fields": start + MANY + b"}",
        "a few more": start + MANY[: MANY.index(b',"k2000"')] + b"}",
        "inside": start + b'"x":{' + MANY + b"}}",
        "list": start + b'"x":[' + b"[]," * 3_000_000 + b"1]}",
    }[form]
    response = await rig.http.post(url, content=body, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert "values" in response.text or "fields" in response.text
    assert not validated


async def test_a_prompt_of_many_token_ids_is_no_flood(rig: Rig) -> None:
    response = await rig.http.post("/v1/completions", json={"prompt": [5] * 200_000})

    assert "values" not in response.text
