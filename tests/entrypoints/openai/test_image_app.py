"""An app without a text stage: the routes of its tasks, and no others."""

from __future__ import annotations

from tests.entrypoints.openai.http_rig import TextParts
from tests.entrypoints.openai.picture_rig import MODEL, picture_server


async def test_only_the_routes_of_its_tasks_exist(text_parts: TextParts) -> None:
    async with picture_server(text_parts.args) as rig:
        absent = ["/v1/completions", "/v1/audio/speech", "/v1/videos", "/tokenize", "/v1/responses"]

        statuses = [(await rig.http.post(path, json={})).status_code for path in absent]
        health = await rig.http.get("/health")
        metrics = await rig.http.get("/metrics")

        assert statuses == [404] * len(absent)
        assert health.json()["stages"] == {"diffusion": "ready"}
        assert metrics.status_code == 200


async def test_a_missing_route_answers_in_openais_shape(text_parts: TextParts) -> None:
    async with picture_server(text_parts.args) as rig:
        error = (await rig.http.post("/v1/completions", json={})).json()["error"]

        assert error["code"] == "not_found"


async def test_models_say_what_the_model_can_and_cannot(text_parts: TextParts) -> None:
    async with picture_server(text_parts.args) as rig:
        card = (await rig.http.get("/v1/models")).json()["data"][0]

        assert card["id"] == MODEL
        assert card["tasks"] == ["image"]
        assert card["modalities"] == {"input": ["image", "text"], "output": ["image"]}
        assert card["diffusion"]["mode"] == "step"
        assert card["diffusion"]["cannot"] == ["lora"]


async def test_the_key_protects_pictures(text_parts: TextParts) -> None:
    async with picture_server(text_parts.args, api_key=["secret"]) as rig:
        refused = await rig.generate()
        health = await rig.http.get("/health")

        assert refused.status_code == 401
        assert health.status_code == 200
        assert not rig.replica.added
