"""/v1/completions: vLLM's text completions with our errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.entrypoints.openai.http_rig import HELLO_TEXT, Rig, TextParts, parse_events, serving
from tests.fakes import failure_output
from vllm_omni.config.deploy import ServerLimits

URL = "/v1/completions"


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts, limits=ServerLimits(max_in_flight=4)) as rig:
        yield rig


async def test_every_choice_of_every_prompt(rig: Rig) -> None:
    response = await rig.http.post(URL, json={"prompt": ["a", "b"], "n": 2})

    choices = response.json()["choices"]
    assert [choice["text"] for choice in choices] == [HELLO_TEXT] * 4
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


async def test_a_stream_ends_with_done(rig: Rig) -> None:
    response = await rig.http.post(URL, json={"prompt": "a", "stream": True})

    *chunks, done = parse_events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == HELLO_TEXT
    assert done == "[DONE]"


async def test_logprobs_come_with_the_text(rig: Rig) -> None:
    response = await rig.http.post(URL, json={"prompt": "a", "logprobs": 1})

    logprobs = response.json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(HELLO_TEXT.split())


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_output_has_a_status(rig: Rig, is_stream: bool) -> None:
    rig.thinker.script = lambda request: [failure_output(request.request_id, "it broke")]

    response = await rig.http.post(URL, json={"prompt": ["a", "b"], "stream": is_stream})

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"
    rig.omni.check_admission(4)


@pytest.mark.parametrize(("fields", "param"), [({"n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt")])
async def test_more_than_the_server_ever_admits_is_a_bad_request(
    rig: Rig, fields: dict[str, object], param: str
) -> None:
    response = await rig.http.post(URL, json={"prompt": "a", **fields})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
