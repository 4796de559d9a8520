"""GLM-Image in two stages, as served: vLLM writes the image tokens, the denoiser draws them.

The checkpoint's own settings keep only the likeliest token, since samplers of two libraries never
draw alike; so the reference's whole call is the oracle.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.served import serve
from tests.parity.diffusion.cases import load_the_reference
from vllm_omni import Omni, OmniDiffusionSamplingParams
from vllm_omni.diffusion.models.glm_image.tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STAGES = ("writer.dtype=float32", "writer.kv_cache_memory_bytes=268435456")
STEPS = 3
SCALE = 3.0


class Wish(NamedTuple):
    prompt: str
    height: int
    width: int
    seed: int


WISHES = (
    Wish("a red fox", 64, 64, 1),
    Wish('a sign that says "hello"', 64, 96, 2),
    Wish("blue", 96, 64, 3),
    Wish("x9!k " * 1000, 64, 64, 4),  # vLLM reads it in parts
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", 1)
    config = path / "vision_language_encoder" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "top_k": 1}))
    return path


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return load_the_reference(model_dir)


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[NDArray[np.float32]]:
    return [drawn(reference, wish) for wish in WISHES]


def drawn(reference: Any, wish: Wish, **more: Any) -> NDArray[np.float32]:
    """What the reference makes of a wish."""
    pixels: NDArray[np.float32] = reference(
        prompt=wish.prompt,
        height=wish.height,
        width=wish.width,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        generator=torch.Generator().manual_seed(wish.seed),
        output_type="np",
        **more,
    ).images[0]
    return (pixels * 255).round()


@pytest.fixture(scope="module")
def client(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    arguments = [word for stage in STAGES for word in ("--stage", stage)]
    with (
        serve(model_dir, tmp_path_factory.mktemp("log") / "server.log", arguments) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_pictures_over_http_are_the_reference_s(
    client: openai.OpenAI, expected: list[NDArray[np.float32]]
) -> None:
    for wish, pixels in zip(WISHES, expected, strict=True):
        answer = client.images.generate(
            prompt=wish.prompt,
            size=f"{wish.width}x{wish.height}",  # type: ignore[arg-type]  # the client's own sizes
            extra_body={
                "seed": wish.seed,
                "num_inference_steps": STEPS,
                "guidance_scale": SCALE,
            },
        )
        assert answer.data is not None
        image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))
        assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1, wish


def test_what_the_picture_cannot_be_is_refused(client: openai.OpenAI) -> None:
    for body, field in (
        ({"size": "65x64"}, "size"),
        ({"extra_body": {"negative_prompt": "x"}}, "negative_prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.generate(prompt="blue", **body)  # type: ignore[arg-type]
        assert refused.value.param == field


def test_one_other_token_is_another_picture(
    reference: Any, expected: list[NDArray[np.float32]]
) -> None:
    """So equal pictures mean equal tokens."""
    wish = WISHES[0]
    tokens, _, _ = reference.generate_prior_tokens(wish.prompt, wish.height, wish.width)
    assert np.array_equal(drawn(reference, wish, prior_token_ids=tokens), expected[0])
    tokens[0, -1] = (tokens[0, -1] + 1) % 64
    assert np.abs(drawn(reference, wish, prior_token_ids=tokens) - expected[0]).max() > 1


@pytest.mark.thorough  # another start of both stages
def test_pictures_offline_are_the_reference_s(
    model_dir: Path, expected: list[NDArray[np.float32]]
) -> None:
    with Omni(model=str(model_dir), stage_overrides=STAGES) as omni:
        for wish, pixels in zip(WISHES, expected, strict=True):
            params = OmniDiffusionSamplingParams(
                seed=wish.seed,
                height=wish.height,
                width=wish.width,
                num_inference_steps=STEPS,
                guidance_scale=SCALE,
            )
            [output] = omni.generate(wish.prompt, params, use_tqdm=False)
            assert output.error is None, output.error
            [image] = output.images
            assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1, wish
