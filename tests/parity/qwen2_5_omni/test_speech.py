"""Thinker and talker together say what the reference says, for prompts of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.parity.omni_prompts import Question, questions
from tests.parity.speech import Chain, Speaker, Spoken, chain
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import PIPELINE
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

NUM_FRAMES = 20
LENGTHS = {"text": 6, "image": 1, "audio": 9, "video": 4, "mixed": 12}


@dataclass
class Case:
    chain: Chain
    spoken: dict[str, Spoken]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[0, 1, 2])
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    model_dir = make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)
    reference = Speaker(model_dir, "Qwen2_5OmniForConditionalGeneration")
    asked: dict[str, Question] = questions()
    spoken = {name: reference.speak(asked[name], num, NUM_FRAMES) for name, num in LENGTHS.items()}
    async with chain(model_dir, PIPELINE) as one:
        yield Case(one, spoken)


async def test_the_codes_are_the_references_for_prompts_of_every_kind(case: Case) -> None:
    said = await asyncio.gather(
        *(case.chain.speak(s.prompt, s.end_token, NUM_FRAMES) for s in case.spoken.values())
    )

    for (name, spoken), (reply, codes) in zip(case.spoken.items(), said, strict=True):
        assert reply == spoken.reply, name
        assert codes == spoken.codes, name


async def test_the_second_time_equals_the_first_though_its_prompt_is_cached(case: Case) -> None:
    for name in ("text", "mixed"):
        spoken = case.spoken[name]
        _, codes = await case.chain.speak(spoken.prompt, spoken.end_token, NUM_FRAMES)
        assert codes == spoken.codes, name
