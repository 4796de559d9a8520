"""The tiny three-stage model on a GPU: CUDA graphs change nothing but the speed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from vllm_omni.config.pipeline import Modality
from vllm_omni.model_executor.models.smol_voice.tiny import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(590)]

PROMPTS: Final = [f"the river number {i} runs" for i in range(8)]
EXACT: Final = ("thinker.dtype=float32", "asr.dtype=float32")
"""Random weights make near ties, which half precision would decide by chance."""


def answers(model: Path, *overrides: str) -> tuple[list[list[int]], list[int]]:
    """Greedy token ids of every prompt, and the number of samples of their speech."""
    from vllm import SamplingParams

    from vllm_omni import Omni

    heard = (np.sin(np.arange(16000) / 20) * 0.3).astype(np.float32)
    with Omni(model=str(model), stage_overrides=(*EXACT, *overrides)) as omni:
        spoken = {
            "prompt": f"{omni.pipeline.placeholders[Modality.AUDIO]} and",
            "multi_modal_data": {"audio": (heard, 16000)},
        }
        prompts = [*PROMPTS, spoken]
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        results = omni.generate(prompts, params, output_modalities=["text", "audio"])
    assert [result.error for result in results] == [None] * len(prompts)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    return tokens, [result.audio.num_samples if result.audio else 0 for result in results]


def test_graphs_say_what_eager_steps_say(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", seed=3)

    with_graphs = answers(model)
    eager = answers(model, "thinker.enforce_eager=true", "asr.enforce_eager=true")

    assert with_graphs == eager
    assert all(len(tokens) == 48 for tokens in with_graphs[0])
    assert sum(with_graphs[1]) > 0
