"""How a stage that another one conditions begins, waits and ends: a talker of the smallest size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.ar_replicas import greedy
from tests.parity.qwen3_omni.reference import chat
from tests.parity.qwen3_omni.talker_harness import Talker, talker
from vllm_omni.engine.messages import StageFailure
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROMPT = chat(40, 41, 42)
CODEC_END = 2150
SLOTS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talker]:
    model_dir = make_tiny(tmp_path_factory.mktemp("tiny") / "model", 0)
    async with talker(model_dir, max_batch_size=SLOTS, max_model_len=128) as one:
        yield one


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_k=50,
        seed=seed,
        max_tokens=12,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def failure_of(stage: Talker, request_id: str) -> StageFailure | None:
    return (await stage.requests.all(request_id))[-1].failure


async def figures(stage: Talker) -> dict[str, Any]:
    found = await stage.requests.client.call_utility_async("figures")
    assert isinstance(found, dict)
    return found


async def test_a_reply_without_words_is_an_empty_utterance(stage: Talker) -> None:
    assert await stage.speak(PROMPT, [], 8) == []


async def test_speech_that_ends_at_once_is_an_empty_utterance(stage: Talker) -> None:
    params = greedy(8, ignore_eos=False, logit_bias={CODEC_END: 100.0})

    assert await stage.speak(PROMPT, [70, 71], 8, params) == []


async def test_a_limit_of_one_frame_is_one_frame(stage: Talker) -> None:
    assert len(await stage.speak(PROMPT, [70, 71], 1)) == 1


async def test_a_thinker_that_fails_fails_the_talker_with_its_words(stage: Talker) -> None:
    parked, first, first_heard = await stage.begin(8)
    starved, second, second_heard = await stage.begin(8)
    second.read(PROMPT)
    second.write(70)
    await second_heard.frames(1)
    for thinker in (first, second):
        thinker.fail("out of memory")

    for request_id, heard in ((parked, first_heard), (starved, second_heard)):
        await heard.all()
        assert heard.end == "error"
        failure = await failure_of(stage, request_id)
        assert failure is not None
        assert failure.message == "stage thinker failed: out of memory"
    assert len(await stage.speak(PROMPT, [70, 71], 5)) == 5


async def test_aborts_reach_requests_that_wait_for_their_first_and_next_input(
    stage: Talker,
) -> None:
    parked, _, first_heard = await stage.begin(8)
    starved, second, second_heard = await stage.begin(8)
    second.read(PROMPT)
    second.write(70)
    await second_heard.frames(1)

    await stage.requests.client.abort_requests_async([parked, starved])

    for heard in (first_heard, second_heard):
        await heard.all()
        assert heard.end == "abort"
    assert (await figures(stage))["num_requests"] == 0
    assert len(await stage.speak(PROMPT, [70, 71], 5)) == 5


async def test_a_stage_where_all_wait_does_not_turn(stage: Talker) -> None:
    requests = [await stage.begin(8) for _ in range(3)]
    _, thinker, heard = requests[0]
    thinker.read(PROMPT)
    thinker.write(70)
    await heard.frames(1)

    before = await figures(stage)
    for _ in range(50):
        after = await figures(stage)

    # Only the questions themselves were turns of its loop.
    assert after["progress"] - before["progress"] == 50
    assert (after["num_requests"], after["num_runnable"]) == (3, 0)
    await stage.requests.client.abort_requests_async([request_id for request_id, *_ in requests])


async def test_more_speakers_than_slots_all_come_to_an_end(stage: Talker) -> None:
    requests = [await stage.begin(6) for _ in range(SLOTS + 3)]
    for _, thinker, _ in requests:
        thinker.read(PROMPT)
        thinker.write(70)
    for _, thinker, _ in reversed(requests):
        thinker.write(71, 72)
        thinker.end()

    codes = [await heard.all() for _, _, heard in requests]

    assert all(one == codes[0] for one in codes)
    assert len(codes[0]) == 6


async def test_a_seed_gives_the_same_speech_whoever_else_speaks(stage: Talker) -> None:
    alone = [await stage.speak(PROMPT, [70, 71, 72], 12, sampled(seed)) for seed in (1, 2)]
    together = await asyncio.gather(
        *(stage.speak(PROMPT, [70, 71, 72], 12, sampled(seed)) for seed in (1, None, 2))
    )

    assert [together[0], together[2]] == alone
    assert alone[0] != alone[1]


async def test_what_is_too_long_fails_alone_and_says_so(stage: Talker) -> None:
    request_id, thinker, heard = await stage.begin(8)
    thinker.read(chat(*range(200)))
    thinker.write(70)
    await heard.all()

    assert heard.end == "error"
    failure = await failure_of(stage, request_id)
    assert failure is not None
    assert "the stage's limit is 128" in failure.message


async def test_an_unknown_voice_fails_alone_and_names_those_there_are(stage: Talker) -> None:
    request_id, _, heard = await stage.begin(8, greedy(8, extra_args={"voice": "nobody"}))
    await heard.all()

    failure = await failure_of(stage, request_id)
    assert failure is not None
    assert "no voice 'nobody'; known: aiden, chelsie, ethan" in failure.message
