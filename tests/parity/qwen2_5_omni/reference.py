"""What transformers' vocoder says of a short utterance, with the noise of a request of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.vocoders import Codes, Samples

BLOCK = 12
"""Codes in a block of the mel network: each becomes two mel frames."""


def noise_of(seed: int, num_codes: int) -> Samples:
    """Noise of a request: each block of mel frames has its own."""
    blocks = -(-num_codes // BLOCK)
    shape = (2 * BLOCK, 80)
    drawn = [
        np.random.default_rng([seed, i]).standard_normal(shape, dtype=np.float32)
        for i in range(blocks)
    ]
    return np.concatenate(drawn)


def spoken_at_once(
    vocoder: Any,
    codes: Codes,
    speaker: Mapping[str, torch.Tensor],
    *,
    seed: int,
    num_steps: int = 10,
) -> Samples:
    """transformers' own call; for as many codes as fit in one window of ours."""
    noise = torch.from_numpy(noise_of(seed, len(codes))[None, : 2 * len(codes)].copy())
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(torch, "randn", lambda *_, **__: noise)
        whole: torch.Tensor = vocoder(
            torch.from_numpy(codes[None, :, 0].astype(np.int64)),
            conditioning=speaker["cond"],
            reference_mel=speaker["ref_mel"],
            num_steps=num_steps,
        )
    samples: Samples = whole.numpy().reshape(-1)
    return samples
