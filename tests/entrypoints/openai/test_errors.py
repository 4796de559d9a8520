"""Errors, keys and bounds, in one shape on every route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tests.entrypoints.openai.http_rig import Rig, TextParts, live, say, serving
from tests.fakes import eventually
from vllm_omni import errors as tree
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.errors import describe, field_path
from vllm_omni.entrypoints.openai.middleware import OPEN_PATHS
from vllm_omni.errors import BadRequestError, DeadlineExceededError, OmniError, ReplicaDiedError


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts, limits=ServerLimits(max_body_bytes=5000)) as rig:
        yield rig


@pytest.mark.parametrize("kind", sorted(tree.ERRORS_BY_CODE.values(), key=lambda kind: kind.code))
def test_every_error_of_ours_keeps_status_and_code(kind: type[OmniError]) -> None:
    answer = describe(kind("what happened"))

    assert (answer.status, answer.code) == (kind.status, kind.code)
    assert answer.message == "what happened"
    assert ("retry-after" in answer.response().headers) == kind.retryable


def test_vllm_s_check_of_the_content_type_is_told_as_it_is() -> None:
    answer = describe(RequestValidationError(["Unsupported Media Type"]))

    assert (answer.status, answer.message) == (400, "Unsupported Media Type")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequestError("no", field="input"), 400, "invalid_request"),
        (DeadlineExceededError("late"), 504, "deadline_exceeded"),
        (ReplicaDiedError("gone"), 503, "replica_died"),
        (VLLMValidationError("no", parameter="n"), 400, "invalid_request"),
        (EngineDeadError(), 503, "stage_unavailable"),
        (NotImplementedError("this"), 501, "not_implemented"),
        (ValueError("no"), 400, "invalid_request"),
        (RuntimeError("secret /etc/path"), 500, "internal_error"),
        (AttributeError("secret"), 500, "internal_error"),
    ],
)
def test_foreign_errors_get_a_status_and_a_code(error: Exception, status: int, code: str) -> None:
    answer = describe(error)

    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in answer.message
    assert json.loads(answer.event().removeprefix("data: "))["error"]["code"] == code


def test_paths_are_written_as_clients_write_them() -> None:
    assert field_path("messages.0.content.1.text") == "messages[0].content[1].text"


async def test_unknown_routes_and_methods(rig: Rig) -> None:
    missing = await rig.http.get("/v1/nothing")
    wrong = await rig.http.get("/v1/chat/completions")

    assert missing.json()["error"]["code"] == "not_found"
    assert wrong.status_code == HTTPStatus.METHOD_NOT_ALLOWED
    assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_a_body_that_is_no_json_is_refused(rig: Rig) -> None:
    plain = await rig.http.post("/v1/chat/completions", content=b"{}")

    assert plain.status_code == 400
    assert isinstance(plain.json()["error"]["code"], str)


async def test_a_body_over_the_bound_is_refused_by_its_header(rig: Rig) -> None:
    response = await rig.chat(content="x" * 6000)

    assert response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_without_a_length_is_bounded_while_it_is_read(rig: Rig) -> None:
    sent = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            sent.append(1)
            yield b"x" * 1000
            await asyncio.sleep(0)

    for url in ("/v1/chat/completions", "/v1/audio/speech", "/v1/responses"):
        sent.clear()
        response = await rig.http.post(
            url, content=body(), headers={"content-type": "application/json"}
        )
        assert response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE, url
        assert len(sent) < 10


async def test_every_route_that_works_needs_the_key(text_parts: TextParts) -> None:
    async with serving(text_parts, api_key=["sesame"]) as rig:
        for route in rig.app.routes:
            path = getattr(route, "path", "")
            for method in sorted(getattr(route, "methods", None) or {"GET"}):
                if method in ("HEAD", "OPTIONS"):
                    continue
                response = await rig.http.request(method, path.replace("{", "x").replace("}", ""))
                if path in OPEN_PATHS:
                    assert response.status_code != 401, path
                else:
                    assert response.status_code == 401, (method, path)
                    assert response.json()["error"]["code"] == "invalid_api_key"

        allowed = {"Authorization": "Bearer sesame"}
        assert (await rig.http.get("/v1/models", headers=allowed)).status_code == 200
        assert (await rig.http.post("/tokenize", json={}, headers=allowed)).status_code == 400
        wrong = {"Authorization": "Bearer open"}
        assert (await rig.http.get("/v1/models", headers=wrong)).status_code == 401


async def test_open_paths_do_not_open_what_is_below_them(text_parts: TextParts) -> None:
    async with serving(text_parts, api_key=["sesame"]) as rig:
        for path in ("/health/../v1/models", "//v1/models", "/v1/models/", "/V1/models"):
            assert (await rig.http.get(path)).status_code in (401, 404), path


async def test_a_deadline_says_what_was_waited_for(text_parts: TextParts) -> None:
    async with serving(text_parts, limits=ServerLimits(request_timeout_s=0.2)) as rig:
        rig.thinker.script = None
        response = await rig.chat()

    assert response.status_code == HTTPStatus.GATEWAY_TIMEOUT
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert "thinker" in response.json()["error"]["message"]


async def test_health_names_the_dead_stage(rig: Rig) -> None:
    healthy = await rig.http.get("/health")
    rig.voice.crash()
    await eventually(lambda: bool(rig.omni.dead_stages()))
    unhealthy = await rig.http.get("/health")
    ping = await rig.http.get("/ping")

    assert healthy.status_code == 200
    assert healthy.json()["status"] == "healthy"
    assert (unhealthy.status_code, ping.status_code) == (503, 503)
    body = unhealthy.json()
    assert body["status"] == "unhealthy"
    assert body["error"].startswith("Stage-2 has no live replica")
    assert "voice" in body["error"]
    assert body["stages"] == {"asr": "ready", "thinker": "ready", "voice": "dead"}


async def test_metrics_are_served(rig: Rig) -> None:
    await rig.chat()
    response = await rig.http.get("/metrics")

    assert response.status_code == 200
    assert "http_requests_total" in response.text


async def test_a_request_running_on_a_dying_stage_hears_of_it(rig: Rig) -> None:
    rig.thinker.script = None
    async with live(rig) as url, httpx.AsyncClient(trust_env=False) as http:
        posting = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=say()))
        await eventually(lambda: bool(rig.thinker.added))
        rig.thinker.crash()
        response = await posting

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "replica_died"
    assert response.headers["retry-after"]


async def test_the_api_describes_itself(rig: Rig) -> None:
    response = await rig.http.get("/openapi.json")

    assert response.status_code == 200
    paths = response.json()["paths"]
    assert {"/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"} <= set(paths)
