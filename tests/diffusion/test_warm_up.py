"""What a replica runs before it is ready."""

from __future__ import annotations

import dataclasses

import pytest

from tests.diffusion.stripes import CAPABILITIES
from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.worker.self_test import self_test_request
from vllm_omni.diffusion.worker.warm_up import warm_up_batches
from vllm_omni.errors import ConfigError


def test_every_size_is_run_alone_longer_and_together() -> None:
    batches = warm_up_batches(CAPABILITIES, ["64x48", "32x32"], max_batch_size=2)

    sizes = [{(one.width, one.height) for one in batch} for batch in batches]
    assert [len(batch) for batch in batches] == [1, 1, 2] * 2
    assert sizes == [{(64, 48)}] * 3 + [{(32, 32)}] * 3
    assert batches[0][0].prompt != batches[1][0].prompt


def test_without_sizes_the_models_own_is_run() -> None:
    batches = warm_up_batches(CAPABILITIES, [], max_batch_size=8)

    assert {(one.width, one.height) for batch in batches for one in batch} == {(32, 32)}
    assert max(len(batch) for batch in batches) == 3


@pytest.mark.parametrize("size", ["large", "64", "64x", "65x64", "0x64"])
def test_what_is_no_size_of_the_model_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="compile_sizes"):
        warm_up_batches(CAPABILITIES, [size], max_batch_size=1)


def test_a_model_with_a_self_test_of_its_own_is_run_at_its_size() -> None:
    own = dataclasses.replace(
        CAPABILITIES, self_test={"width": 96, "height": 64, "upstream": {"tokens": (1, 2)}}
    )

    [[one]] = warm_up_batches(own, [], max_batch_size=1)[:1]
    assert (one.width, one.height, one.upstream) == (96, 64, {"tokens": (1, 2)})
    with pytest.raises(ConfigError, match="compile_sizes"):
        warm_up_batches(own, ["64x64"], max_batch_size=1)


def test_a_self_test_brings_what_the_model_asks_for() -> None:
    video = dataclasses.replace(
        CAPABILITIES,
        emits=Modality.VIDEO,
        min_images=1,
        size_multiple=48,
        max_frames=81,
        frames_multiple=4,
        defaults={**CAPABILITIES.defaults, "fps": 16},
    )
    one = self_test_request(video)

    assert (one.width, one.height, one.num_frames, one.fps) == (96, 96, 5, 16)
    assert one.images[0].shape == (96, 96, 3)
