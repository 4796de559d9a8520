"""Operators' routes over HTTP, their key, and what /health says of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.entrypoints.openai.http_rig import Rig, TextParts, serving
from tests.fakes import eventually

KEY = {"X-Admin-Key": "open sesame"}
ROUTES = [
    ("GET", "/v1/omni/replicas"),
    ("POST", "/v1/omni/replicas/voice/0/restart"),
    ("POST", "/v1/omni/replicas/voice/0/drain"),
    ("POST", "/v1/omni/replicas/voice/x/drain"),
]


def state_of(rig: Rig, stage: str = "voice") -> str:
    return next(one.state for one in rig.omni.replica_statuses() if one.stage == stage)


async def post(rig: Rig, action: str, replica: str = "voice/0") -> tuple[int, Any]:
    response = await rig.http.post(f"/v1/omni/replicas/{replica}/{action}", headers=KEY)
    return response.status_code, response.json()


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_configured_key_they_are_off(
    method: str, path: str, text_parts: TextParts
) -> None:
    async with serving(text_parts) as rig:
        response = await rig.http.request(method, path, headers=KEY)
        assert response.status_code == 403
        error = response.json()["error"]
        assert error["code"] == "admin_disabled"
        assert "--admin-api-key" in error["message"]
        assert "VLLM_OMNI_ADMIN_API_KEY" in error["message"]
        assert state_of(rig) == "ready"


@pytest.mark.parametrize(
    "headers",
    [{}, {"X-Admin-Key": "open"}, {"X-Admin-Key": ""}, {"Authorization": "Bearer open sesame"}],
)
async def test_a_wrong_key_is_refused(headers: dict[str, str], text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        for method, path in ROUTES:
            response = await rig.http.request(method, path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_admin_key"
        assert state_of(rig) == "ready"


async def test_both_keys_are_needed_where_both_are_configured(text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame", api_key=["user"]) as rig:
        user = {"Authorization": "Bearer user"}
        statuses = [
            (await rig.http.get("/v1/omni/replicas", headers=headers)).status_code
            for headers in ({}, KEY, user, {**user, **KEY})
        ]
        assert statuses == [401, 401, 401, 200]
        codes = [
            (await rig.http.get("/v1/omni/replicas", headers=headers)).json()["error"]["code"]
            for headers in (KEY, user)
        ]
        assert codes == ["invalid_api_key", "invalid_admin_key"]


async def test_the_replicas_are_listed(text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        response = await rig.http.get("/v1/omni/replicas", headers=KEY)
        assert response.status_code == 200
        replicas = response.json()["replicas"]
        assert all(replica.pop("start_took_s") >= 0 for replica in replicas)
        assert replicas == [
            {
                "stage": stage,
                "replica": 0,
                "state": "ready",
                "restarts": 0,
                "last_error": None,
                "next_attempt_in_s": None,
            }
            for stage in ("asr", "thinker", "voice")
        ]


async def test_a_drained_replica_stays_down_until_it_is_restarted(text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        status, body = await post(rig, "drain")
        assert (status, body["stage"], body["state"]) == (202, "voice", "draining")
        await eventually(lambda: state_of(rig) == "stopped")
        health = await rig.http.get("/health")
        assert health.status_code == 503
        assert health.json()["stages"]["voice"] == "dead"
        assert health.json()["replicas"]["voice"][0]["state"] == "stopped"
        assert (await rig.chat()).status_code == 200, "text needs no voice"
        status, body = await post(rig, "restart")
        assert (status, body["state"]) == (202, "starting")
        await eventually(lambda: state_of(rig) == "ready")
        assert (await rig.http.get("/health")).status_code == 200
        speech = await rig.http.post(
            "/v1/audio/speech", json={"input": "back", "voice": "default", "response_format": "pcm"}
        )
        assert speech.status_code == 200


@pytest.mark.parametrize("replica", ["voice/1", "voice/-1", "nobody/0"])
@pytest.mark.parametrize("action", ["restart", "drain"])
async def test_an_unknown_replica_is_not_found(
    action: str, replica: str, text_parts: TextParts
) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        status, body = await post(rig, action, replica)
        assert (status, body["error"]["code"]) == (404, "unknown_replica")
        assert replica in body["error"]["message"]


async def test_a_number_that_is_none_is_a_bad_request(text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        assert (await post(rig, "drain", "voice/x"))[0] == 400


async def test_what_the_state_forbids_is_a_conflict(text_parts: TextParts) -> None:
    async with serving(text_parts, admin_key="open sesame") as rig:
        await post(rig, "drain")
        await eventually(lambda: state_of(rig) == "stopped")
        status, body = await post(rig, "drain")
        assert (status, body["error"]["code"]) == (409, "replica_state")
        assert body["error"]["message"] == "stage voice/0 is stopped"


async def test_health_says_what_becomes_of_a_dead_replica(text_parts: TextParts) -> None:
    deploy = {"max_restarts": 3, "restart_backoff_s": 30.0}
    async with serving(text_parts, deploy=deploy) as rig:
        rig.voice.crash("CUDA out of memory")
        await eventually(lambda: state_of(rig) == "backoff")
        response = await rig.http.get("/health")
        body = response.json()
        assert response.status_code == 503
        assert body["error"] == "Stage-2 has no live replica (voice)"
        (replica,) = body["replicas"]["voice"]
        assert 0 < replica.pop("next_attempt_in_s") <= 30
        assert 0 <= replica.pop("start_took_s") < 5
        assert replica == {
            "replica": 0,
            "state": "backoff",
            "restarts": 0,
            "last_error": "CUDA out of memory",
        }
        assert body["replicas"]["thinker"][0]["state"] == "ready"


async def test_health_of_a_stage_that_was_given_up_has_its_last_error(
    text_parts: TextParts,
) -> None:
    async with serving(text_parts) as rig:  # no restarts
        rig.voice.crash("CUDA out of memory")
        await eventually(lambda: state_of(rig) == "stopped")
        (replica,) = (await rig.http.get("/health")).json()["replicas"]["voice"]
        assert (replica["last_error"], replica["next_attempt_in_s"]) == ("CUDA out of memory", None)
