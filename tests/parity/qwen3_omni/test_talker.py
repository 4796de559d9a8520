"""The talker's codes equal the reference's, whatever way its text comes and whoever else speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.ar_replicas import greedy
from tests.parity.qwen3_omni.reference import Reference, Spoken, chat
from tests.parity.qwen3_omni.talker_harness import Talker, talker
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2)))
"""Codes of three seeds are compared, with a thinker before, in `test_thinkers_and_talkers.py`."""
NUM_FRAMES = 24
REPLIES = (6, 1, 9, 3, 12, 2, 8, 5)
"""Lengths of the replies of eight requests."""


@dataclass
class Case:
    talker: Talker
    reference: Reference
    spoken: list[Spoken]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talker]:
    """One engine for all seeds: it takes the next one's weights in place."""
    model_dir = make_tiny(tmp_path_factory.mktemp("tiny") / "model", 0)
    # Memory for about half of the requests: the others are preempted and computed again.
    async with talker(model_dir, num_gpu_blocks_override=10, max_model_len=128) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SEEDS)
async def case(
    running: Talker, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    model_dir = make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)
    await running.requests.load(model_dir)
    reference = Reference(model_dir)
    prompts = [chat(*range(1000 * i + 40, 1000 * i + 45 + i)) for i in range(len(REPLIES))]
    spoken = [
        reference.speak(prompt, num, NUM_FRAMES)
        for prompt, num in zip(prompts, REPLIES, strict=True)
    ]
    return Case(running, reference, spoken)


async def test_a_whole_utterance_is_the_references(case: Case) -> None:
    spoken = case.spoken[0]

    codes = await case.talker.speak(spoken.prompt, spoken.reply, NUM_FRAMES)

    assert codes[: len(spoken.codes)] == spoken.codes
    assert len(spoken.codes) > len(spoken.reply), "it goes on speaking after its text has ended"


async def test_text_that_comes_step_by_step_gives_the_same_frame_by_frame(case: Case) -> None:
    spoken = case.spoken[2]
    _, thinker, heard = await case.talker.begin(NUM_FRAMES)

    thinker.read(spoken.prompt)
    for i, token in enumerate(spoken.reply):
        thinker.write(token)
        assert await heard.frames(i + 1) == spoken.codes[: i + 1], "one frame for each token"
    thinker.end()

    assert (await heard.all())[: len(spoken.codes)] == spoken.codes
    assert heard.end == "length"


async def test_eight_together_under_preemption_equal_each_alone(case: Case) -> None:
    before = case.talker.num_preempted
    all_codes = await asyncio.gather(
        *(case.talker.speak(s.prompt, s.reply, NUM_FRAMES) for s in case.spoken)
    )

    for codes, spoken in zip(all_codes, case.spoken, strict=True):
        assert codes[: len(spoken.codes)] == spoken.codes
    assert case.talker.num_preempted > before, "memory was to be too small for all"


async def test_a_request_that_waits_for_text_holds_up_nobody(case: Case) -> None:
    slow, quick = case.spoken[4], case.spoken[0]
    _, thinker, heard = await case.talker.begin(NUM_FRAMES)
    thinker.read(slow.prompt)
    thinker.write(*slow.reply[:2])
    await heard.frames(2)

    codes = await case.talker.speak(quick.prompt, quick.reply, NUM_FRAMES)

    assert codes[: len(quick.codes)] == quick.codes
    assert len(heard.codes) == 2
    thinker.write(*slow.reply[2:])
    thinker.end()
    assert (await heard.all())[: len(slow.codes)] == slow.codes


async def test_the_voice_is_the_references(case: Case) -> None:
    spoken = case.reference.speak(case.spoken[0].prompt, 4, NUM_FRAMES, "Chelsie")
    params = greedy(NUM_FRAMES, ignore_eos=False, extra_args={"voice": "chelsie"})

    codes = await case.talker.speak(spoken.prompt, spoken.reply, NUM_FRAMES, params)

    assert codes[: len(spoken.codes)] == spoken.codes
