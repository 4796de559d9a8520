"""Tiny models of the families of pictures and videos, served and asked by the official client."""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from benchmarks.picture_share import measure
from benchmarks.served import serve
from tests.entrypoints.openai.media.clips import png

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(400)]

FAST = {"seed": 3, "num_inference_steps": 2}
SQUARE: Any = "64x64"
PICTURES = (
    ("flux", "dev"),
    ("flux", "schnell"),
    ("plain_diffusers", "text_to_image"),
    ("qwen_image", "text_to_image"),
    ("stable_diffusion_3", ""),
    ("z_image", ""),
)
VIDEOS = ("t2v_2_1", "t2v_2_2", "i2v_2_1", "i2v_2_2", "ti2v_2_2")


@contextlib.contextmanager
def served(folder: Path, family: str, variant: str = "") -> Iterator[openai.OpenAI]:
    tiny = importlib.import_module(f"vllm_omni.diffusion.models.{family}.tiny")
    model = tiny.make_tiny(folder / "model", **({"variant": variant} if variant else {}))
    arguments = ["--data-dir", str(folder / "data")] if family == "wan_video" else []
    with (
        serve(model, folder / "server.log", arguments) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def pixels_of(answer: Any) -> list[NDArray[np.uint8]]:
    files = [base64.b64decode(one.b64_json) for one in answer.data]
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


def test_the_share_of_the_server_is_measured() -> None:
    figures = measure("64x64", steps=2, requests=3)

    assert 0 < figures["share_ms_min"] <= figures["share_ms"] <= figures["share_ms_max"]


def refused_field(call: Any, **given: Any) -> str | None:
    with pytest.raises(openai.BadRequestError) as refused:
        call(**given)
    return refused.value.param


@pytest.mark.parametrize(("family", "variant"), PICTURES)
def test_pictures_from_a_text(tmp_path: Path, family: str, variant: str) -> None:
    with served(tmp_path, family, variant) as client:
        generate = client.images.generate
        first, second = pixels_of(generate(prompt="a fox", size=SQUARE, n=2, extra_body=FAST))
        again = generate(prompt="a fox", size=SQUARE, extra_body={**FAST, "seed": 4})
        stream = generate(prompt="a fox", size=SQUARE, stream=True, extra_body=FAST)
        events = [event.type for event in stream]

        assert first.shape == (64, 64, 3)
        assert not np.array_equal(first, second)
        assert np.array_equal(pixels_of(again)[0], second), "picture i has the seed plus i"
        assert events[-1] == "image_generation.completed"
        assert refused_field(generate, prompt="a fox", size="65x64") == "size"
        edit = {"prompt": "x", "image": ("a.png", png(), "image/png")}
        assert refused_field(client.images.edit, **edit) == "image"


def test_a_picture_is_edited(tmp_path: Path) -> None:
    with served(tmp_path, "qwen_image", "edit") as client:
        image = ("a.png", png(64, 48), "image/png")
        given = {"prompt": "at night", "size": SQUARE, "extra_body": FAST}
        edit = client.images.edit
        [plain] = pixels_of(edit(image=image, **given))
        more = {**FAST, "negative_prompt": "day", "true_cfg_scale": 4.0}
        [guided] = pixels_of(edit(image=image, **given | {"extra_body": more}))

        assert plain.shape == (64, 64, 3)
        assert not np.array_equal(plain, guided)
        assert refused_field(edit, image=image, mask=image, **given) == "mask"
        assert refused_field(edit, image=[image, image], **given) == "image"
        assert refused_field(client.images.generate, prompt="x") == "image"


def test_a_part_of_a_picture_is_painted_anew(tmp_path: Path) -> None:
    with served(tmp_path, "plain_diffusers", "inpaint") as client:
        image = ("a.png", png(64, 64), "image/png")
        wrong = ("b.png", png(32, 64), "image/png")
        body = {**FAST, "strength": 1.0}
        given = {"prompt": "a dog", "size": SQUARE, "extra_body": body}
        [painted] = pixels_of(client.images.edit(image=image, mask=image, **given))

        assert painted.shape == (64, 64, 3)
        assert refused_field(client.images.edit, image=image, mask=wrong, **given) == "mask"
        assert refused_field(client.images.edit, image=image, **given) == "mask"


@pytest.mark.parametrize("variant", VIDEOS)
def test_videos(tmp_path: Path, variant: str) -> None:
    image = ("a.png", png(32, 32), "image/png")
    given = {"input_reference": image} if variant.startswith("i2v") else {}
    with served(tmp_path, "wan_video", variant) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the client, for these calls
        video = client.videos.create_and_poll(
            prompt="waves", size="32x32", seconds="0.3", extra_body=FAST, **given
        )  # type: ignore[call-overload]  # the client's own sizes and lengths
        assert video.status == "completed", video.error
        file = client.videos.download_content(video.id).read()

    with av.open(io.BytesIO(file)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    # 0.3 s at the model's own rate, to the nearest number of frames that it makes.
    assert len(frames) == (9 if variant == "ti2v_2_2" else 5)
    assert frames[0].shape == (32, 32, 3)
