"""What a model does not take is refused by the name of its field, before anything runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.diffusion.stripes import CAPABILITIES
from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.checks import load_capabilities, make_request
from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams as Params
from vllm_omni.inputs.prompt import ImageInput, OmniPrompt

IMAGE = ImageInput(np.zeros((32, 48, 3), np.uint8))
MASK = ImageInput(np.zeros((32, 48), np.uint8))
VIDEO = dataclasses.replace(
    CAPABILITIES,
    emits=Modality.VIDEO,
    params=frozenset({"num_frames", "fps"}),
    defaults={**CAPABILITIES.defaults, "num_frames": 9, "fps": 16},
    max_frames=17,
    frames_multiple=4,
)
EDIT = dataclasses.replace(CAPABILITIES, min_images=1, max_images=2, defaults={})


def made(
    params: Params | None = None, capabilities: Capabilities = CAPABILITIES, **prompt: Any
) -> Any:
    values = {"text": "a cat", **prompt}
    return make_request("r", OmniPrompt(**values), params or Params(), capabilities)


def refused(params: Params, capabilities: Capabilities = CAPABILITIES, **prompt: Any) -> str:
    with pytest.raises(BadRequestError) as caught:
        made(params, capabilities, **prompt)
    assert caught.value.field is not None
    return caught.value.field


def test_defaults_fill_what_is_left_open() -> None:
    one = made(Params(num_inference_steps=7))

    assert (one.num_inference_steps, one.height, one.width, one.num_frames) == (7, 32, 32, 1)
    assert one.guidance_scale == 1.0


def test_a_schedule_has_a_shortest_and_a_longest() -> None:
    bounded = dataclasses.replace(CAPABILITIES, min_steps=2, max_steps=5)
    for steps in (1, 6):
        assert refused(Params(num_inference_steps=steps), bounded) == "num_inference_steps"
    assert made(Params(num_inference_steps=2), bounded).num_inference_steps == 2


def test_without_a_seed_no_two_are_alike() -> None:
    assert made().seed != made().seed
    assert made(Params(seed=5)).seed == 5


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"true_cfg_scale": 2.0}, "true_cfg_scale"),
        ({"strength": 0.5}, "strength"),
        ({"num_frames": 9}, "num_frames"),
        ({"lora": "wild"}, "lora"),
        ({"extra_args": {"eta": 1}}, "extra_args"),
        ({"num_outputs_per_prompt": 2}, "n"),
        ({"height": 33, "width": 32}, "height"),
        ({"height": 32, "width": 40}, "width"),
        ({"height": 32}, "width"),
        ({"width": 32}, "height"),
        ({"height": 8192, "width": 8192}, "height"),
        ({"height": 1024, "width": 8192}, "width"),
    ],
)
def test_what_the_model_does_not_do_is_refused(params: dict[str, Any], field: str) -> None:
    assert refused(Params(**params)) == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": -1}, "num_inference_steps"),
        ({"num_inference_steps": 1001}, "num_inference_steps"),
        ({"num_inference_steps": True}, "num_inference_steps"),
        ({"num_inference_steps": "4"}, "num_inference_steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": float("inf")}, "guidance_scale"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"guidance_scale": "high"}, "guidance_scale"),
        ({"true_cfg_scale": float("nan")}, "true_cfg_scale"),
        ({"strength": 0.0}, "strength"),
        ({"strength": 1.5}, "strength"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"height": 0}, "height"),
        ({"width": 10**9}, "width"),
        ({"quality": "best"}, "quality"),
        ({"negative_prompt": "x" * 10_000}, "negative_prompt"),
        ({"negative_prompt": 5}, "negative_prompt"),
        ({"num_outputs_per_prompt": 17}, "num_outputs_per_prompt"),
        ({"num_outputs_per_prompt": None}, "num_outputs_per_prompt"),
        ({"lora": 5}, "lora"),
        ({"lora_scale": 1.0}, "lora_scale"),
        ({"preview_interval": 0}, "preview_interval"),
    ],
)
def test_what_is_wrong_for_every_model_is_no_params(params: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        Params(**params)

    assert caught.value.field == field


def test_pictures_and_masks_are_counted_and_measured() -> None:
    assert refused(Params(), EDIT) == "image"
    assert refused(Params(), EDIT, images=(IMAGE,) * 3) == "image"
    assert refused(Params(), VIDEO, images=(IMAGE,) * 2) == "image"
    assert refused(Params(), mask=MASK) == "mask"
    small = ImageInput(np.zeros((16, 48), np.uint8))
    assert refused(Params(), images=(IMAGE,), mask=small) == "mask"
    no_mask = dataclasses.replace(CAPABILITIES, takes_mask=False)
    assert refused(Params(), no_mask, images=(IMAGE,), mask=MASK) == "mask"
    none = dataclasses.replace(CAPABILITIES, max_images=0, takes_mask=False)
    assert refused(Params(), none, images=(IMAGE,)) == "image"
    needs_mask = dataclasses.replace(CAPABILITIES, needs_mask=True)
    assert refused(Params(), needs_mask, images=(IMAGE,)) == "mask"
    one = made(Params(), images=(IMAGE,), mask=MASK)
    assert (one.images[0].shape, one.mask.shape) == ((32, 48, 3), (32, 48))


def test_the_size_may_be_left_to_the_picture() -> None:
    edit = dataclasses.replace(EDIT, defaults={"num_inference_steps": 4})
    one = made(Params(), edit, images=(IMAGE,))

    assert (one.height, one.width) == (None, None)


def test_frames_are_bounded_and_fit_the_model() -> None:
    assert made(Params(), VIDEO).num_frames == 9
    assert refused(Params(num_frames=21), VIDEO) == "num_frames"
    assert refused(Params(num_frames=10), VIDEO) == "num_frames"


@pytest.mark.parametrize("text", [None, "x" * 10_000])
def test_a_prompt_is_a_text_of_some_length(text: str | None) -> None:
    assert refused(Params(), text=text) == "prompt"


def test_previews_need_a_model_that_has_them() -> None:
    without = dataclasses.replace(CAPABILITIES, has_preview=False)

    assert refused(Params(preview_interval=2), without) == "preview_interval"


async def test_the_preparer_knows_the_adapters_of_its_replicas() -> None:
    able = dataclasses.replace(CAPABILITIES, loads_lora=True)
    preparer = DiffusionPreparer("dit", able, ["wild", "calm"])
    prompt = OmniPrompt(text="a cat")

    assert await preparer.prepare("r", prompt, Params(lora="wild"), {}) is prompt
    with pytest.raises(BadRequestError, match="no adapter 'tame'; known: calm, wild"):
        await preparer.prepare("r", prompt, Params(lora="tame"), {})
    with pytest.raises(BadRequestError, match="no option 'priority'"):
        await preparer.prepare("r", prompt, Params(), {"priority": 1})
    with pytest.raises(BadRequestError, match="OmniDiffusionSamplingParams"):
        await preparer.prepare("r", prompt, object(), {})


@pytest.mark.parametrize("name", [None, "nowhere:x", "tests.diffusion.stripes:nothing"])
def test_capabilities_that_are_not_there_stop_the_start(name: str | None) -> None:
    with pytest.raises(ConfigError, match="stage 'dit': capabilities of '/'"):
        load_capabilities(name, Path("/"), "dit")
