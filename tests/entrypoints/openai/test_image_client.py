"""The official client and pictures: it understands the answers, and every refusal has a name."""

from __future__ import annotations

import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.entrypoints.openai.http_rig import TextParts, openai_client
from tests.entrypoints.openai.picture_rig import (
    MODEL,
    SIZE,
    PictureRig,
    opened,
    picture_server,
    png,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Task

PICTURE = ("a.png", png(), "image/png")


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[PictureRig]:
    limits = ServerLimits(max_in_flight=20, max_image_bytes=1_000_000)
    async with picture_server(text_parts.args, limits=limits) as rig:
        yield rig


@pytest.fixture
async def client(rig: PictureRig) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(rig) as client:
        yield client


def header_of(width: int, height: int) -> bytes:
    """A PNG of this size by its header, with next to nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


async def test_generations(client: AsyncOpenAI) -> None:
    answer = await client.images.generate(
        model=MODEL, prompt="a fox", n=2, size=f"{SIZE}x{SIZE}", extra_body={"seed": 8}
    )

    assert answer.data is not None
    assert [opened(one.b64_json or "").getpixel((0, 0))[0] for one in answer.data] == [8, 9]
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8


async def test_a_stream_of_generations(client: AsyncOpenAI) -> None:
    stream = await client.images.generate(
        model=MODEL, prompt="a fox", stream=True, partial_images=2
    )
    found = [event async for event in stream]

    kinds = [event.type for event in found]
    # Previews that come faster than they are read are merged: the later one stands.
    assert 1 <= kinds.count("image_generation.partial_image") <= 2
    assert "image_generation.progress" in kinds
    assert kinds[-1] == "image_generation.completed"


async def test_edits(client: AsyncOpenAI, rig: PictureRig) -> None:
    answer = await client.images.edit(
        model=MODEL, prompt="bluer", image=[PICTURE, PICTURE], mask=PICTURE,
        extra_body={"num_inference_steps": 2, "guidance_scale": 1.5},
    )  # fmt: skip

    assert answer.data is not None
    assert opened(answer.data[0].b64_json or "").size == (SIZE, SIZE)
    assert (len(rig.requested.images), rig.requested.num_inference_steps) == (2, 2)
    assert rig.requested.guidance_scale == 1.5


async def test_videos(text_parts: TextParts, tmp_path: Path) -> None:
    async with (
        picture_server(text_parts.args, task=Task.VIDEO, data_dir=tmp_path) as rig,
        openai_client(rig) as client,
    ):
        with pytest.deprecated_call():
            video = await client.videos.create_and_poll(
                prompt="waves", seconds="4", input_reference=PICTURE
            )
            pages = [one.id async for one in client.videos.list(limit=1)]
            content = await client.videos.download_content(video.id)
            deleted = await client.videos.delete(video.id)

    assert (video.status, video.seconds, video.progress) == ("completed", "4", 100)
    assert pages == [video.id]
    assert content.content[4:8] == b"ftyp"
    assert deleted.deleted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"size": "33x32"}, "size"),
    ({"size": "100000x100000"}, "size"),
    ({"size": "4096x4096"}, "size"),
    ({"size": "0x32"}, "size"),
    ({"size": "-32x32"}, "size"),
    ({"size": "32"}, "size"),
    ({"size": 32}, "size"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": -3}, "num_inference_steps"),
    ({"num_inference_steps": 51}, "num_inference_steps"),
    ({"num_inference_steps": 10**30}, "num_inference_steps"),
    ({"num_inference_steps": 2.5}, "num_inference_steps"),
    ({"num_inference_steps": "4"}, "num_inference_steps"),
    ({"num_inference_steps": True}, "num_inference_steps"),
    ({"guidance_scale": -1.0}, "guidance_scale"),
    ({"guidance_scale": 1e300}, "guidance_scale"),
    ({"guidance_scale": "3"}, "guidance_scale"),
    ({"true_cfg_scale": [1]}, "true_cfg_scale"),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"negative_prompt": "x" * 10_000}, "negative_prompt"),
    ({"negative_prompt": 3}, "negative_prompt"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 21}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"quality": "low"}, "quality"),
    ({"quality": 1}, "quality"),
    ({"response_format": "url"}, "response_format"),
    ({"response_format": "gif"}, "response_format"),
    ({"output_format": "svg"}, "output_format"),
    ({"output_compression": 101}, "output_compression"),
    ({"output_compression": 50}, "output_compression"),
    ({"background": "transparent"}, "background"),
    ({"partial_images": 4}, "partial_images"),
    ({"partial_images": 1}, "partial_images"),
    ({"stream": "yes"}, "stream"),
    ({"strength": 0}, "strength"),
    ({"lora": "x"}, "lora"),
    ({"extra_args": {"callback": "os.system"}}, "extra_args"),
    ({"extra_args": "x"}, "extra_args"),
    ({"hieght": 3}, "hieght"),
    ({"num_frames": 5}, "num_frames"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_bad_generations_name_the_field(
    client: AsyncOpenAI, rig: PictureRig, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.images.generate(model=MODEL, prompt="a fox", extra_body=fields)

    assert refused.value.param == param
    assert not rig.replica.added


async def test_a_guidance_that_is_no_number_is_no_json_for_us(rig: PictureRig) -> None:
    body = '{"prompt": "x", "guidance_scale": NaN}'
    kind = {"content-type": "application/json"}

    response = await rig.http.post("/v1/images/generations", content=body, headers=kind)

    assert response.status_code == 400


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.images.generate(model="other", prompt="a fox")

    assert refused.value.param == "model"


SEA = png(48, 32)
BAD_EDITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"image": ("a.png", b"", "image/png")}, {}, "image"),
    ({"image": ("a.png", b"no picture", "image/png")}, {}, "image"),
    ({"image": ("a.png", png(64, 64)[:-60], "image/png")}, {}, "image"),
    ({"image": ("a.png", header_of(10_000, 10_000), "image/png")}, {}, "image"),
    ({"image": ("a.png", header_of(60_000, 60_000), "image/png")}, {}, "image"),
    ({"image": ("a.png", header_of(2**31 - 1, 1), "image/png")}, {}, "image"),
    ({"image": ("a.png", b"x" * 1_000_001, "image/png")}, {}, "image"),
    ({"image": [PICTURE, ("b.png", b"GIF89a", "image/png")]}, {}, "image[1]"),
    ({"image": [PICTURE] * 3}, {}, "image"),
    ({"image": [PICTURE] * 17}, {}, "image"),
    ({"image": PICTURE, "mask": ("m.png", SEA, "image/png")}, {}, "mask"),
    ({"image": PICTURE, "mask": ("m.png", b"?", "image/png")}, {}, "mask"),
    ({"image": PICTURE}, {"guidance_scale": "nan"}, "guidance_scale"),
    ({"image": PICTURE}, {"guidance_scale": "inf"}, "guidance_scale"),
    ({"image": PICTURE}, {"num_inference_steps": "many"}, "num_inference_steps"),
    ({"image": PICTURE}, {"strength": 1.5}, "strength"),
    ({"image": PICTURE}, {"extra_args": "{"}, "extra_args"),
    ({"image": PICTURE}, {"input_fidelity": "high"}, "input_fidelity"),
]


@pytest.mark.parametrize(("files", "fields", "param"), BAD_EDITS)
async def test_bad_edits_name_the_field(
    client: AsyncOpenAI,
    rig: PictureRig,
    files: dict[str, Any],
    fields: dict[str, Any],
    param: str,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.images.edit(model=MODEL, prompt="bluer", extra_body=fields, **files)

    assert refused.value.param == param, refused.value
    assert not rig.replica.added
    answer = await client.images.generate(model=MODEL, prompt="the next one works")
    assert answer.data


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"image": (None, "not a url")}, "image"),
    ({"image": (None, "data:text/plain;base64,AA==")}, "image"),
    ({"image": (None, "data:image/png;base64,***")}, "image"),
    ({"image": (None, "http://127.0.0.1/a.png")}, "image"),
    ({"image[x][y]": (None, "1")}, "image[x][y]"),
    ({"photo": PICTURE, "image": PICTURE}, "photo"),
]


@pytest.mark.parametrize(("files", "param"), BAD_FORMS)
async def test_bad_forms_name_the_field(rig: PictureRig, files: dict[str, Any], param: str) -> None:
    response = await rig.http.post("/v1/images/edits", files={"prompt": (None, "x"), **files})

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_edit_without_a_picture_and_other_bodies(rig: PictureRig) -> None:
    bare = await rig.http.post("/v1/images/edits", json={"prompt": "x"})
    text = await rig.http.post(
        "/v1/images/edits", content=b"x", headers={"content-type": "text/plain"}
    )
    broken = await rig.http.post(
        "/v1/images/edits", content=b"x", headers={"content-type": "multipart/form-data"}
    )

    assert bare.json()["error"]["param"] == "image"
    assert (text.status_code, broken.status_code) == (415, 400)


BAD_VIDEOS: list[tuple[dict[str, Any], str]] = [
    ({"seconds": "0"}, "seconds"),
    ({"seconds": "-4"}, "seconds"),
    ({"seconds": "nan"}, "seconds"),
    ({"seconds": "four"}, "seconds"),
    ({"seconds": "60"}, "seconds"),
    ({"seconds": [4]}, "seconds"),
    ({"num_frames": 10}, "num_frames"),
    ({"num_frames": 45}, "num_frames"),
    ({"num_frames": 9, "seconds": "1"}, "num_frames"),
    ({"fps": 0}, "fps"),
    ({"size": "33x32"}, "size"),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"input_reference": {"file_id": "file-1"}}, "input_reference.file_id"),
    ({"input_reference": "data:image/png;base64,AAAA"}, "input_reference"),
    ({"input_reference": "http://10.0.0.1/a.png"}, "input_reference"),
    ({"n": 2}, "n"),
    ({"remix": "x"}, "remix"),
]


async def test_bad_videos_name_the_field_and_make_no_job(
    text_parts: TextParts, tmp_path: Path
) -> None:
    async with picture_server(text_parts.args, task=Task.VIDEO, data_dir=tmp_path) as rig:
        found = []
        for fields, _ in BAD_VIDEOS:
            response = await rig.http.post("/v1/videos", json={"prompt": "a sea", **fields})
            found.append((response.status_code, response.json()["error"]["param"]))
        queries = [
            (await rig.http.get("/v1/videos", params=params)).json()["error"]["param"]
            for params in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "video_1"})
        ]
        jobs = (await rig.http.get("/v1/videos")).json()["data"]

    assert found == [(400, param) for _, param in BAD_VIDEOS]
    assert queries == ["limit", "limit", "order", "after"]
    assert jobs == []
