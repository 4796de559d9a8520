"""Each family's pictures are the reference's, alone and in a batch whose members differ.

The same weights, prompt, seed, steps and guidance. A batched matrix product sums in another order,
so latents may differ by 1e-5; pixels by one grey level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from diffusers.pipelines.wan import pipeline_wan_i2v

from tests.parity.diffusion.cases import CASES, Case, load_the_reference
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import BadRequestError

SEEDS = (0, 1, 2)

TOLERANCE = 1e-5
PROMPTS = (
    "a red fox",
    "a blue house by the sea, an oil painting with many small boats",
    "cat",
    "four lazy dogs under a green sky",
)

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    case: Case
    ours: Any
    reference: Any


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    case: Case = request.param
    with pytest.MonkeyPatch.context() as patch:
        dimensions = pipeline_qwenimage_edit.calculate_dimensions
        # The reference scales a picture to a megapixel before it edits it: a minute on a CPU.
        patch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda _, ratio: dimensions(96**2, ratio),
        )
        # A package that mends wrongly decoded texts; there are none here.
        mender = SimpleNamespace(fix_text=lambda text: text)
        patch.setattr(pipeline_wan_i2v, "ftfy", mender, raising=False)
        model_dir = case.make(tmp_path_factory.mktemp("tiny") / "model", seed=1)
        ours = case.load(model_dir)
        if ours.look_modulations_up(max_batch_size=4, max_prepared=8):
            ours.modulations.window = 2  # so that requests here take several
        yield Pair(case, ours, load_the_reference(model_dir))


def begin(pipeline: Any, request: DiffusionRequest) -> Any:
    return pipeline.prepare(request, pipeline.encode([request])[0])


def tick(pipeline: Any, states: Sequence[Any]) -> int:
    """One step of everyone, those that may share a forward together; returns the forwards."""
    groups: dict[object, list[Any]] = {}
    for state in states:
        if not state.is_done:
            groups.setdefault(pipeline.batch_key(state), []).append(state)
    for group in groups.values():
        pipeline.denoise_step(group)
    return len(groups)


def finish(pipeline: Any, states: Sequence[Any]) -> None:
    while tick(pipeline, states):
        pass


def assert_latents_equal(pair: Pair, state: Any) -> None:
    expected = pair.case.reference_run(pair.reference, state.request, "latent")
    actual = pair.ours.final_latents(state)
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE, f"{state.request.request_id}: {difference}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_alone_is_the_reference_s(pair: Pair, seed: int) -> None:
    request = pair.case.request(seed, PROMPTS[seed], steps=3)
    state = begin(pair.ours, request)
    finish(pair.ours, [state])

    assert_latents_equal(pair, state)
    pixels = pair.case.reference_run(pair.reference, request, "np")[0]
    (actual,) = pair.ours.decode([state])
    assert actual.dtype == np.uint8
    expected = (pixels * 255).round()
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected).max() <= 1


def test_members_of_a_batch_are_what_they_are_alone(pair: Pair) -> None:
    """Different prompts, steps and seeds; each comes a step later; one leaves in the middle."""
    requests = [pair.case.request(10 + i, prompt, steps=3 + i) for i, prompt in enumerate(PROMPTS)]
    running: list[Any] = []
    widest = 0
    for request in requests:
        running.append(begin(pair.ours, request))
        tick(pair.ours, running)
        widest = max(widest, len({pair.ours.batch_key(s) for s in running if not s.is_done}))
    left = running.pop(1)
    finish(pair.ours, running)

    assert not left.is_done
    assert widest == 1, "they did not share forwards"
    for state in running:
        assert_latents_equal(pair, state)


def test_a_request_after_one_of_another_size_is_the_reference_s(pair: Pair) -> None:
    sizes = ({"height": 96, "width": 64}, {"height": 64, "width": 96})
    for i, size in enumerate(sizes):
        state = begin(pair.ours, pair.case.request(20 + i, PROMPTS[i], steps=2, **size))
        finish(pair.ours, [state])
        assert_latents_equal(pair, state)


def test_without_guidance_it_is_the_reference_s(pair: Pair) -> None:
    scales = {"guidance_scale", "true_cfg_scale"} & set(pair.case.options)
    off = dict.fromkeys(scales, pair.case.unguided)
    state = begin(pair.ours, pair.case.request(30, PROMPTS[0], steps=2, **off))
    finish(pair.ours, [state])

    assert not state.is_guided
    assert_latents_equal(pair, state)


def test_a_step_that_fails_leaves_every_member_where_it_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be run again: here the last member's schedule has no memory for its step."""
    states = [begin(pair.ours, pair.case.request(40 + i, PROMPTS[i], steps=3)) for i in range(2)]
    finish_one = type(states[1].schedule).step
    calls = iter((False, True))

    def step(schedule: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls, False):
            raise torch.OutOfMemoryError("no memory")
        return finish_one(schedule, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(states[1].schedule), "step", step)
        with pytest.raises(torch.OutOfMemoryError):
            pair.ours.denoise_step(states)
    assert [state.step_index for state in states] == [0, 0]
    finish(pair.ours, states)
    for state in states:
        assert_latents_equal(pair, state)


def test_a_text_longer_than_the_model_takes_is_refused(pair: Pair) -> None:
    if "max_sequence_length" not in pair.case.options:
        pytest.skip("this model has no such option")
    with pytest.raises(BadRequestError, match="max_sequence_length must be at most"):
        pair.ours.encode([pair.case.request(50, PROMPTS[0], 2, max_sequence_length=4096)])
