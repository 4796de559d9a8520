"""vLLM's own routes in this server: nothing of ours is ignored there, and errors have our shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
from fastapi.routing import APIRoute
from vllm.multimodal.media import MediaConnector

from tests.entrypoints.openai.http_rig import MODEL, Rig, TextParts, answers, say, serving
from tests.fakes import eventually
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.admission import GENERATING
from vllm_omni.entrypoints.openai.errors import without_paths
from vllm_omni.entrypoints.openai.vllm_routes import (
    ABSENT,
    MAX_TEXT_CHARS,
    TEXT_ONLY,
    named_in,
    num_answers,
)

WITHOUT_STAGES: Final = frozenset(
    {
        "/detokenize",
        "/inference/v1/abort_requests",
        "/ping",
        "/tokenize",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/omni/replicas/{stage}/{replica}/drain",
        "/v1/omni/replicas/{stage}/{replica}/restart",
        "/v1/responses/render",
        "/v1/responses/{response_id}/cancel",
    }
)
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hi"}]]},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/invocations": say(),
    "/v1/completions": {"prompt": "hi"},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [3]},
    "/inference/v1/generate": {"token_ids": [3], "sampling_params": {"max_tokens": 2}},
    "/v1/chat/completions/render": say(),
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/messages/render": {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/responses/render": {"model": MODEL, "input": "hi"},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(
        text_parts, limits=ServerLimits(max_in_flight=4), enable_scale_out=True
    ) as rig:
        rig.thinker.script = answers("Hello.")
        yield rig


async def test_every_route_that_takes_work_is_known(rig: Rig) -> None:
    posted = {
        route.path
        for route in rig.app.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }

    assert posted - WITHOUT_STAGES <= GENERATING
    assert not posted & ABSENT
    assert set(BODIES) == TEXT_ONLY


@pytest.mark.parametrize("field", ["modalities", "audio", "sampling_params_list"])
@pytest.mark.parametrize("url", sorted(BODIES))
async def test_audio_is_refused_where_it_would_be_ignored(rig: Rig, url: str, field: str) -> None:
    value: dict[str, object] = {
        "modalities": ["text", "audio"],
        "audio": {"voice": "default", "format": "wav"},
        "sampling_params_list": [None, {}, None],
    }
    response = await rig.http.post(url, json={**BODIES[url], field: value[field]})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_request")


@pytest.mark.parametrize("url", sorted(TEXT_ONLY - {"/generative_scoring"}))
async def test_text_alone_is_no_reason_to_refuse(rig: Rig, url: str) -> None:
    plain = await rig.http.post(url, json=BODIES[url])
    asked = await rig.http.post(url, json={**BODIES[url], "modalities": ["text"]})

    assert asked.status_code == plain.status_code
    assert plain.status_code == 200, plain.text


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * 5}, ""),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 2}, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 5}, "n"),
        ("/invocations", {"prompt": ["a"] * 5}, "prompt"),
        ("/invocations", say(n=5), "n"),
        ("/v1/chat/completions", say(n=5), "n"),
        ("/generative_scoring", {"query": "a", "items": ["b"] * 5, "label_token_ids": [3]}, ""),
    ],
)
async def test_more_than_could_ever_run_is_no_overload(
    rig: Rig, url: str, fields: dict[str, Any], param: str
) -> None:
    response = await rig.http.post(url, json=fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == (param or ("items" if "items" in fields else "messages"))
    assert "4" in error["message"]
    assert "retry-after" not in response.headers


async def test_a_batch_that_fits_later_is_told_to_come_again(rig: Rig) -> None:
    rig.thinker.script = None
    running = asyncio.create_task(rig.chat())
    await eventually(lambda: len(rig.thinker.added) > 0 and rig.omni._admission.in_flight == 1)
    batch = {"messages": [[{"role": "user", "content": "a"}]] * 4}
    response = await rig.http.post("/v1/chat/completions/batch", json=batch)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    rig.thinker.script = answers("Hello.")

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/responses", {"model": "other", "input": "hi"}),
        ("/v1/chat/completions/batch", {"model": "other"}),
        ("/tokenize", {"model": "other", "prompt": "hi"}),
    ],
)
async def test_errors_of_vllm_s_handlers_have_names_as_codes(
    rig: Rig, url: str, fields: dict[str, Any]
) -> None:
    response = await rig.http.post(url, json={**BODIES.get(url, {}), **fields})

    assert response.status_code == 404, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(response.content) == int(response.headers["content-length"])


WRONG_VALUES: Final[list[tuple[dict[str, Any], str]]] = [
    ({"n": 0}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"bad_words": [""]}, "bad_words"),
    ({"seed": 2**70}, "seed"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_VALUES, ids=str)
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
async def test_a_value_out_of_range_names_its_field(
    rig: Rig, url: str, fields: dict[str, Any], param: str
) -> None:
    response = await rig.http.post(url, json={**(BODIES.get(url) or say()), **fields})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == param, error
    assert error["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("top_k must be 0, got -5", "top_k"),
        ("Chat template is passed with request", "chat_template"),
        ("min_tokens must be at most max_tokens=5", "min_tokens"),
        ("This model's prompt is too long", None),
        ("an n-th thing", "n"),
        ("nothing of it", None),
    ],
)
async def test_the_field_is_the_one_that_a_message_names_first(
    message: str, field: str | None
) -> None:
    fields = ["model", "prompt", "n", "max_tokens", "min_tokens", "top_k", "chat_template"]
    assert named_in(message, fields) == field


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/completions", {"prompt": "word " * 400}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 50_000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 400}, "prompt"),
        ("/v1/responses", {"input": "word " * 400}, "input"),
        ("/v1/chat/completions", say("word " * 400), "messages"),
        ("/v1/chat/completions", say("word " * 50_000), "messages"),
        (
            "/v1/chat/completions",
            say([{"type": "file", "file": {"file_id": "x"}}]),
            "messages[0].content[0].file.file_id",
        ),
        ("/v1/chat/completions/batch", {"messages": [say("word " * 400)["messages"]]}, "messages"),
    ],
)
async def test_what_is_refused_in_a_prompt_has_the_name_that_the_request_gives_it(
    rig: Rig, url: str, body: dict[str, Any], field: str
) -> None:
    response = await rig.http.post(url, json={"model": MODEL, **body})

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x" * (MAX_TEXT_CHARS + 1)}, "prompt"),
        (say("x" * (MAX_TEXT_CHARS + 1)), "messages"),
        (say([{"type": "text", "text": "x" * MAX_TEXT_CHARS}, "x"]), "messages"),
    ],
    ids=["prompt", "message", "parts"],
)
async def test_more_text_than_any_model_reads_is_not_tokenized(
    rig: Rig, body: dict[str, Any], field: str
) -> None:
    response = await rig.http.post("/tokenize", json={"model": MODEL, **body})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("url", sorted(TEXT_ONLY))
async def test_a_body_that_is_no_object_is_told_so(rig: Rig, url: str) -> None:
    headers = {"content-type": "application/json"}
    for body in ("[]", '"text"', "1", "null", "true"):
        response = await rig.http.post(url, content=body, headers=headers)
        assert response.status_code == 400
        assert "must be a JSON object" in response.text


@pytest.mark.parametrize("body", [say(), {"prompt": "hi", "max_tokens": 2}], ids=["chat", "text"])
@pytest.mark.parametrize("name", ["other", "\u00e9t\u00e9", "\u6a21\u578b", "a\r\nb"])
async def test_the_model_of_an_invocation_is_checked(
    rig: Rig, body: dict[str, Any], name: str
) -> None:
    """The library of this route puts a header in its place, or nothing."""
    mine = await rig.http.post("/invocations", json={**body, "model": MODEL})
    unnamed = await rig.http.post("/invocations", json={**body, "model": None})
    other = await rig.http.post("/invocations", json={**body, "model": name})

    assert (mine.status_code, unnamed.status_code) == (200, 200)
    assert other.status_code == 404, other.text
    error = other.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_an_error_of_the_other_api_keeps_its_shape(rig: Rig) -> None:
    response = await rig.http.post(
        "/v1/messages", json={**BODIES["/v1/messages"], "model": "other"}
    )

    assert response.status_code == 404
    assert response.json()["type"] == "error"


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/chat/completions/batch", "/tokenize"])
async def test_no_message_shows_a_folder_of_the_server(rig: Rig, url: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: list[Any] = [{"role": "user", "content": [picture]}]
    response = await rig.http.post(
        url, json={"messages": [messages] if url.endswith("batch") else messages}
    )

    assert response.status_code == 400, response.text
    assert "/tmp" not in response.text
    assert str(rig.app.state.args.model).rpartition("/")[0] not in response.text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/models/tiny is not a multimodal model", "tiny is not a multimodal model"),
        ("see '/srv/models/tiny/' for it", "see '' for it"),
        ("use /v1/chat/completions instead", "use /v1/chat/completions instead"),
        ("cannot read https://host/a/b.wav", "cannot read https://host/a/b.wav"),
        ("input/output and 3/4/5 are no paths", "input/output and 3/4/5 are no paths"),
    ],
)
async def test_paths_are_taken_out_of_messages(message: str, shown: str) -> None:
    assert without_paths(message) == shown


async def test_what_cannot_be_scaled_has_no_route(rig: Rig) -> None:
    response = await rig.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_vllm_s_own_fetcher_connects_nowhere(rig: Rig) -> None:
    config = rig.app.state.engine_client.model_config
    fetcher = MediaConnector(allowed_media_domains=config.allowed_media_domains)

    for url in (
        "http://127.0.0.1:9/a.png",
        "https://example.com/a.png",
        "http://[::1]/a",
        "http:a",
    ):
        with pytest.raises(ValueError, match="allowed domains"):
            await fetcher.fetch_image_async(url)


async def test_an_abort_by_id_is_an_abort(rig: Rig) -> None:
    rig.thinker.script = None
    running = asyncio.create_task(
        rig.http.post("/inference/v1/generate", json=BODIES["/inference/v1/generate"])
    )
    await eventually(lambda: bool(rig.omni._internal_ids))
    ids = list(rig.omni._internal_ids)
    for wrong in (7, None, [7, {}], "nothing"):
        await rig.http.post("/inference/v1/abort_requests", json={"request_ids": wrong})
    assert rig.omni._internal_ids
    await rig.http.post("/inference/v1/abort_requests", json={"request_ids": ids})
    response = await asyncio.wait_for(running, 10)
    rig.thinker.script = answers("Hello.")

    assert response.status_code >= 400
    assert not rig.omni._internal_ids


@pytest.mark.parametrize(
    ("body", "num"),
    [
        ({"messages": [{"role": "user"}] * 9}, (1, "n")),
        ({"messages": [[{}], [{}]]}, (2, "messages")),
        ({"prompt": [1, 2, 3]}, (1, "n")),
        ({"prompt": [[1], [2], [3]], "n": 2}, (6, "prompt")),
        ({"n": 7}, (7, "n")),
        ({"n": "7", "prompt": {}, "items": 5}, (1, "n")),
        ({"questions": {"a": {}, "b": {}}}, (2, "questions")),
    ],
)
async def test_answers_are_counted(body: dict[str, Any], num: tuple[int, str]) -> None:
    assert num_answers(json.loads(json.dumps(body))) == num
