"""Any other diffusers folder: its pictures are the reference's, and it can be stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.parity.diffusion.cases import context_of, load_the_reference, picture
from vllm_omni.config.detect import detect
from vllm_omni.config.registry import ANY_DIFFUSERS
from vllm_omni.diffusion.models.plain_diffusers.diffusion_pipeline import AnyDiffusers
from vllm_omni.diffusion.models.plain_diffusers.tiny import VARIANTS, make_tiny
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.worker.self_test import self_test_request
from vllm_omni.errors import BadRequestError

SEEDS = (0, 1, 2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("generic")
    return {name: make_tiny(root / name, 1, name) for name in VARIANTS}


def request(seed: int = 0, **more: Any) -> DiffusionRequest:
    fields: dict[str, Any] = {
        "request_id": str(seed),
        "prompt": "a red fox",
        "negative_prompt": "blurry",
        "seed": seed,
        "num_inference_steps": 3,
        "height": 64,
        "width": 64,
        "guidance_scale": 4.0,
    }
    return DiffusionRequest(**fields | more)


def goes_on(step: int, num_steps: int) -> bool:
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_a_picture_is_the_reference_s(folders: dict[str, Path], seed: int) -> None:
    folder = folders["text_to_image"]
    pixels = AnyDiffusers(context_of(folder)).run(request(seed), goes_on)

    assert detect(folder) == ANY_DIFFUSERS
    expected = load_the_reference(folder)(
        prompt="a red fox",
        negative_prompt="blurry",
        height=64,
        width=64,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
    assert np.array_equal(pixels, np.asarray(expected))


def test_a_repainted_picture_is_the_reference_s(folders: dict[str, Path]) -> None:
    folder = folders["inpaint"]
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 16:48] = 255
    asked = request(images=(picture(3),), mask=mask, strength=1.0)
    pixels = AnyDiffusers(context_of(folder)).run(asked, goes_on)

    expected = load_the_reference(folder)(
        prompt="a red fox",
        negative_prompt="blurry",
        image=PIL.Image.fromarray(picture(3)),
        mask_image=PIL.Image.fromarray(mask),
        height=64,
        width=64,
        strength=1.0,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replica_can_test_itself(folders: dict[str, Path], variant: str) -> None:
    pipeline = AnyDiffusers(context_of(folders[variant]))

    made = pipeline.run(self_test_request(pipeline.capabilities), goes_on)

    assert made is not None
    assert made.shape == (64, 64, 3)


def test_steps_are_reported_and_nobody_waiting_ends_it(folders: dict[str, Path]) -> None:
    pipeline = AnyDiffusers(context_of(folders["text_to_image"]))
    seen: list[tuple[int, int]] = []

    def stop_at_two(step: int, num_steps: int) -> bool:
        seen.append((step, num_steps))
        return step < 2

    assert pipeline.run(request(), stop_at_two) is None
    assert seen == [(1, 3), (2, 3)]
    after = pipeline.run(request(), goes_on)
    alone = AnyDiffusers(context_of(folders["text_to_image"])).run(request(), goes_on)
    assert np.array_equal(after, alone)


@pytest.mark.parametrize(
    "extra", [{"output_type": "latent"}, {"nonsense": 1}, {"eta": {"a": 1}}, {"latents": [None]}]
)
def test_extra_arguments_are_checked(folders: dict[str, Path], extra: dict[str, object]) -> None:
    pipeline = AnyDiffusers(context_of(folders["text_to_image"]))
    with pytest.raises(BadRequestError, match="extra argument"):
        pipeline.run(request(extra_args=extra), goes_on)


def test_what_the_model_refuses_is_a_bad_request(folders: dict[str, Path]) -> None:
    pipeline = AnyDiffusers(context_of(folders["text_to_image"]))
    with pytest.raises(BadRequestError, match="divisible by 8"):
        pipeline.run(request(height=60), goes_on)


def test_an_extra_argument_changes_the_picture(folders: dict[str, Path]) -> None:
    pipeline = AnyDiffusers(context_of(folders["text_to_image"]))
    with_it = pipeline.run(request(extra_args={"guidance_rescale": 0.7}), goes_on)
    assert not np.array_equal(with_it, pipeline.run(request(), goes_on))
