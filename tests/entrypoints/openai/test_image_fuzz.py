"""Every field of requests for pictures and videos with every wrong type: never a 500."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.entrypoints.openai.http_rig import TextParts
from tests.entrypoints.openai.picture_rig import PictureRig, data_url, picture_server, png
from tests.entrypoints.openai.test_fuzz import WRONG, paths, replaced
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.image_chat.protocol import ImageChatRequest
from vllm_omni.entrypoints.openai.images.protocol import ImageRequest
from vllm_omni.entrypoints.openai.videos.protocol import VideoRequest

URL: Final = data_url(png(16, 16))
EDIT: Final[dict[str, Any]] = {
    "prompt": "x",
    "images": [{"image_url": URL}, URL],
    "mask": {"image_url": URL},
    "num_inference_steps": 1,
}
CHAT: Final[dict[str, Any]] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": URL}},
            ],
        }
    ],
    "modalities": ["image"],
    "stream_options": {"include_usage": True},
    "num_inference_steps": 1,
}
VIDEO: Final[dict[str, Any]] = {
    "prompt": "x",
    "input_reference": {"image_url": URL},
    "num_inference_steps": 1,
    "num_frames": 1,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def painter(text_parts: TextParts) -> AsyncIterator[PictureRig]:
    async with picture_server(text_parts.args) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def animator(
    text_parts: TextParts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PictureRig]:
    folder = tmp_path_factory.mktemp("videos")
    limits = ServerLimits(max_queued_videos=200)
    async with picture_server(
        text_parts.args, task=Task.VIDEO, data_dir=folder, limits=limits
    ) as rig:
        yield rig


async def send(rig: PictureRig, url: str, body: object) -> None:
    response = await rig.http.post(url, json=body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert isinstance(error["code"], str), error
        assert error["message"]


@pytest.mark.parametrize("field", sorted({*ImageRequest.model_fields, "image", "extra"}))
async def test_generation_fields(painter: PictureRig, field: str) -> None:
    for wrong in WRONG:
        body = {"prompt": "x", "num_inference_steps": 1, field: wrong}
        await send(painter, "/v1/images/generations", body)


async def test_every_place_of_an_edit(painter: PictureRig) -> None:
    for path in list(paths(EDIT)):
        for wrong in WRONG:
            await send(painter, "/v1/images/edits", replaced(EDIT, path, wrong))


async def test_every_place_of_a_chat(painter: PictureRig) -> None:
    for path in list(paths(CHAT)):
        for wrong in WRONG:
            await send(painter, "/v1/chat/completions", replaced(CHAT, path, wrong))


@pytest.mark.parametrize("field", sorted({*ImageChatRequest.model_fields, "tools"}))
async def test_chat_fields(painter: PictureRig, field: str) -> None:
    for wrong in WRONG:
        await send(painter, "/v1/chat/completions", {**CHAT, field: wrong})


async def test_every_place_of_a_video(animator: PictureRig) -> None:
    for path in list(paths(VIDEO)):
        for wrong in WRONG:
            await send(animator, "/v1/videos", replaced(VIDEO, path, wrong))


@pytest.mark.parametrize("field", sorted({*VideoRequest.model_fields, "metadata"}))
async def test_video_fields(animator: PictureRig, field: str) -> None:
    for wrong in WRONG:
        await send(animator, "/v1/videos", {**VIDEO, field: wrong})


@pytest.mark.parametrize("url", ["/v1/images/generations", "/v1/images/edits"])
async def test_bodies_that_are_no_object(painter: PictureRig, url: str) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1}x', b"NaN", b"[]", b"3"):
        response = await painter.http.post(url, content=raw, headers=headers)
        assert response.status_code == 400, (raw[:20], response.text)


async def test_forms_that_are_none(painter: PictureRig) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for raw in (b"", b"--b", b"--b\r\n\r\n", b"--b--\r\n", b"\x00" * 1000, b"--b\r\nA: b\r\n\r\nx"):
        response = await painter.http.post("/v1/images/edits", content=raw, headers=headers)
        assert response.status_code == 400, (raw[:20], response.text)
