"""The image tokens that GLM-Image writes for itself are the reference's, and so is the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.diffusion.cases import context_of, load_the_reference
from vllm_omni.diffusion.models.glm_image.diffusion_pipeline import PRIOR, GlmImage
from vllm_omni.diffusion.models.glm_image.tiny import make_tiny
from vllm_omni.diffusion.request import DiffusionRequest

SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2)))

pytestmark = pytest.mark.slow

PROMPTS = ("a red fox", 'a sign that says "hello"', "the words 'one' and 'two'")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_and_latents_are_the_reference_s(model_dir: Path, seed: int) -> None:
    asked = DiffusionRequest(
        request_id="0",
        prompt=PROMPTS[seed],
        seed=seed,
        num_inference_steps=3,
        height=64,
        width=96,
        guidance_scale=3.0,
        max_sequence_length=2048,
    )
    ours = GlmImage(context_of(model_dir))
    random_before = torch.random.get_rng_state()
    [conditioning] = ours.encode([asked])
    assert torch.equal(torch.random.get_rng_state(), random_before)
    state = ours.prepare(asked, conditioning)
    while not state.is_done:
        ours.denoise_step([state])

    reference = load_the_reference(model_dir)
    tokens, _, _ = reference.generate_prior_tokens(
        asked.prompt, 64, 96, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(conditioning.positive[PRIOR], tokens)
    call = {
        "prompt": asked.prompt,
        "height": 64,
        "width": 96,
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
    }
    latents = reference(
        **call, generator=torch.Generator().manual_seed(seed), output_type="latent"
    ).images
    assert (state.latents - latents).abs().max() <= 1e-5
    pixels = reference(
        **call,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        prior_token_ids=tokens,
    ).images[0]
    assert np.abs(ours.decode([state])[0] - (pixels * 255).round()).max() <= 1
