"""The thinker writes what transformers writes, however the engine cuts and repeats the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.omni_prompts import Reference
from tests.parity.thinkers import (
    HOW,
    check_parity,
    num_preemptions,
    questions_for,
    thinker,
    without_voice,
)
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("seed", "how"), list(enumerate(HOW)))
def test_64_greedy_tokens_are_the_reference_s(tmp_path: Path, seed: int, how: str) -> None:
    model_dir = without_voice(make_tiny(tmp_path / "tiny", seed))
    reference = Reference(model_dir, "Qwen3OmniMoeForConditionalGeneration")
    preempted = num_preemptions()
    with thinker(model_dir, **HOW[how]) as omni:
        check_parity(omni, reference, questions_for(how))
    if how == "with little memory":
        assert num_preemptions() > preempted
