"""/v1/images: pictures from text, whole and streamed, over a fake replica."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.entrypoints.openai.http_rig import TextParts
from tests.entrypoints.openai.picture_rig import (
    MODEL,
    SIZE,
    STEPS,
    PictureRig,
    opened,
    picture_server,
    png,
)
from vllm_omni.config.deploy import ServerLimits


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[PictureRig]:
    limits = ServerLimits(max_in_flight=8)
    async with picture_server(text_parts.args, limits=limits) as rig:
        yield rig


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream; each says its own name."""
    found = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.rpartition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert not name or name == f"event: {event['type']}"
        found.append(event)
    return found


async def test_a_picture_comes_as_a_png_with_openais_fields(rig: PictureRig) -> None:
    response = await rig.generate(seed=7)

    answer = response.json()
    assert response.status_code == 200, response.text
    image = opened(answer["data"][0]["b64_json"])
    assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (SIZE, SIZE), (7, 0, 0))
    assert answer["size"] == f"{SIZE}x{SIZE}"
    assert answer["output_format"] == "png"
    assert answer["background"] == "opaque"
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"text_tokens": 5, "image_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": 4},
        "total_tokens": 9,
    }


async def test_every_option_arrives_in_the_engine(rig: PictureRig) -> None:
    await rig.generate(
        size="64x48",
        seed=3,
        quality="lossless",
        negative_prompt="blurry",
        num_inference_steps=6,
        guidance_scale=2.5,
        true_cfg_scale=4,
    )

    wanted = rig.requested
    assert (wanted.width, wanted.height, wanted.seed) == (64, 48, 3)
    assert (wanted.quality, wanted.negative_prompt) == ("lossless", "blurry")
    assert (wanted.num_inference_steps, wanted.guidance_scale, wanted.true_cfg_scale) == (6, 2.5, 4)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("auto", None), ("standard", None), ("medium", None), ("hd", "high"), ("high", "high")],
)
async def test_openais_qualities_have_a_meaning(
    rig: PictureRig, given: str, wanted: str | None
) -> None:
    await rig.generate(quality=given)

    assert rig.requested.quality == wanted


async def test_several_pictures_have_seeds_in_a_row_and_keep_their_order(rig: PictureRig) -> None:
    response = await rig.generate(n=3, seed=10)

    reds = [opened(one["b64_json"]).getpixel((0, 0))[0] for one in response.json()["data"]]
    assert reds == [10, 11, 12]
    assert len(rig.replica.added) == 3


@pytest.mark.parametrize(
    ("form", "fields", "magic"),
    [
        ("jpeg", {"output_compression": 60}, b"\xff\xd8"),
        ("webp", {"output_compression": 60}, b"RIFF"),
        ("webp", {}, b"RIFF"),
        ("png", {}, b"\x89PNG"),
    ],
)
async def test_formats(rig: PictureRig, form: str, fields: dict[str, Any], magic: bytes) -> None:
    answer = (await rig.generate(output_format=form, **fields)).json()

    assert base64.b64decode(answer["data"][0]["b64_json"]).startswith(magic)
    assert answer["output_format"] == form


async def test_a_stream_tells_progress_and_ends_with_the_picture(rig: PictureRig) -> None:
    response = await rig.generate(stream=True, partial_images=1, seed=9)

    found = events(response.text)
    kinds = [event["type"].removeprefix("image_generation.") for event in found]
    steps = [event["step"] for event in found if "step" in event]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert steps == sorted(set(steps)), "each step is told once"
    assert steps[-1] == STEPS
    assert kinds.count("partial_image") == 1
    assert kinds[-1] == "completed"
    partial = found[kinds.index("partial_image")]
    assert partial["partial_image_index"] == 0
    assert opened(partial["b64_json"]).size == (8, 8)
    assert opened(found[-1]["b64_json"]).getpixel((0, 0))[0] == 9
    assert found[-1]["usage"]["output_tokens"] == 4


async def test_a_stream_of_several_pictures_says_which_is_which(rig: PictureRig) -> None:
    found = events((await rig.generate(stream=True, n=2, seed=20)).text)

    done = {event["image_index"]: event for event in found if "b64_json" in event}
    reds = [opened(done[index]["b64_json"]).getpixel((0, 0))[0] for index in (0, 1)]
    assert reds == [20, 21]


async def test_an_edit_brings_its_pictures_and_mask(rig: PictureRig) -> None:
    mask = png(40, 24, "RGBA", (0, 0, 0, 0))
    files = [
        ("image[]", ("a.png", png(40, 24, color=(1, 2, 3)), "image/png")),
        ("image[]", ("b.png", png(16, 16, color=(4, 5, 6)), "image/png")),
        ("mask", ("m.png", mask, "image/png")),
    ]

    response = await rig.edit(files, seed=5, num_inference_steps=3)

    assert response.status_code == 200, response.text
    wanted = rig.requested
    assert [image.shape for image in wanted.images] == [(24, 40, 3), (16, 16, 3)]
    assert wanted.images[0][0, 0].tolist() == [1, 2, 3]
    assert wanted.mask is not None
    assert wanted.mask.min() == 255
    assert (wanted.seed, wanted.num_inference_steps) == (5, 3)
    tokens = response.json()["usage"]["input_tokens_details"]["image_tokens"]
    assert tokens == 3 * 2 + 1


async def test_an_edit_as_json_takes_data_urls(rig: PictureRig) -> None:
    from tests.entrypoints.openai.picture_rig import data_url

    url = data_url(png(16, 32, color=(9, 9, 9)))
    body = {"model": MODEL, "prompt": "x", "images": [{"image_url": url}, url]}

    response = await rig.http.post("/v1/images/edits", json=body)

    assert response.status_code == 200, response.text
    assert [image.shape for image in rig.requested.images] == [(32, 16, 3)] * 2


async def test_a_mask_without_transparency_is_painted_where_it_is_white(rig: PictureRig) -> None:
    files = [
        ("image", ("a.png", png(), "image/png")),
        ("mask", ("m.png", png(mode="L", color=255), "image/png")),
    ]

    await rig.edit(files)

    assert rig.requested.mask is not None
    assert rig.requested.mask.min() == 255


async def test_an_edit_stream_has_names_of_its_own(rig: PictureRig) -> None:
    files = [("image", ("a.png", png(), "image/png"))]

    response = await rig.edit(files, stream="true")

    kinds = {event["type"] for event in events(response.text)}
    assert kinds == {"image_edit.progress", "image_edit.completed"}
