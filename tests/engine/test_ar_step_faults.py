"""A step of a real core that raises costs the request that makes it raise, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from tests.ar_replicas import ENGINE_ARGS, Requests, greedy, replica
from tests.dfx.reliability.orders import Fault, seed_for
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.messages import StageFailure
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [OmniPrompt(token_ids=[12, 40, 77, 5, 130, i]) for i in range(8)]
FAULTY = {**ENGINE_ARGS, "worker_cls": "tests.dfx.reliability.faulty_worker.FaultyWorker"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(model_dir: Path) -> AsyncIterator[Requests]:
    async with replica(model_dir, engine_args=FAULTY) as requests:
        yield requests


async def alone(thinker: Requests, prompt: OmniPrompt) -> Sequence[int]:
    output = await thinker.run("alone", prompt, greedy(30))
    return output.outputs[0].token_ids


async def together(
    thinker: Requests, faults: dict[int, int], number: int
) -> list[StageFailure | Sequence[int]]:
    """Requests in one batch, some with the seed of a fault; what became of each."""
    for i in range(number):
        # Slow steps, so that all are in the batch before a fault.
        seed = faults.get(i, seed_for(Fault.PACE, 20))
        await thinker.submit(f"r{i}", PROMPTS[i], greedy(30, seed=seed))
    results: list[StageFailure | Sequence[int]] = []
    for i in range(number):
        last = (await thinker.all(f"r{i}"))[-1]
        results.append(last.failure or last.text.outputs[0].token_ids)
    assert await thinker.client.call_utility_async("num_requests") == 0
    assert thinker.client._outputs.num_entries == 0
    return results


@pytest.mark.parametrize(("number", "step"), [(1, 0), (2, 1), (8, 0), (8, 7)])
async def test_the_others_say_what_they_say_alone(
    thinker: Requests, step: int, number: int
) -> None:
    expected = [await alone(thinker, prompt) for prompt in PROMPTS[:number]]
    bad = number // 2
    results = await together(thinker, {bad: seed_for(Fault.RAISE, step)}, number)

    assert results.pop(bad) == StageFailure(
        "request_failed", "stage thinker failed: RuntimeError: ordered by the test"
    )
    expected.pop(bad)
    assert results == expected
    assert await alone(thinker, PROMPTS[0])


async def test_several_of_a_batch_fail_and_each_with_its_own_error(thinker: Requests) -> None:
    expected = [await alone(thinker, prompt) for prompt in PROMPTS]
    faults = {
        1: seed_for(Fault.RAISE, 3),
        2: seed_for(Fault.MEMORY, 3),
        6: seed_for(Fault.MEMORY, 12),
    }
    results = await together(thinker, faults, 8)

    failures = {i: one.code for i, one in enumerate(results) if isinstance(one, StageFailure)}
    assert failures == {1: "request_failed", 2: "out_of_memory", 6: "out_of_memory"}
    for i in set(range(8)) - set(faults):
        assert results[i] == expected[i]


async def test_a_request_that_comes_meanwhile_is_not_accused(thinker: Requests) -> None:
    bad = seed_for(Fault.RAISE, 2)
    for i in range(4):
        await thinker.submit(f"r{i}", PROMPTS[i], greedy(30, seed=bad if i == 3 else None))
    for i in range(4, 8):
        await thinker.submit(f"r{i}", PROMPTS[i], greedy(30))
        await asyncio.sleep(0)
    failed = [i for i in range(8) if (await thinker.all(f"r{i}"))[-1].failure is not None]

    assert failed == [3]


async def test_an_abort_of_a_suspect_lets_the_others_go_on(thinker: Requests) -> None:
    bad = seed_for(Fault.RAISE, 2)
    for i in range(6):
        seed = bad if i == 5 else seed_for(Fault.PACE, 20)
        params = greedy(30, seed=seed, output_kind=RequestOutputKind.DELTA)
        await thinker.submit(f"r{i}", PROMPTS[i], params)
    await thinker.next("r0")
    await thinker.client.abort_requests_async(["r0", "r5", "r2"])
    for i in (1, 3, 4):
        assert (await thinker.all(f"r{i}"))[-1].failure is None
    assert await thinker.client.call_utility_async("num_requests") == 0


async def test_a_model_that_raises_for_everybody_is_a_death_with_its_own_error(
    model_dir: Path,
) -> None:
    async with replica(model_dir, engine_args=FAULTY) as doomed:
        await doomed.submit("running", PROMPTS[0], greedy(500, seed=seed_for(Fault.BREAK, 3)))
        error = await asyncio.wait_for(asyncio.shield(doomed.death), 20)

    assert isinstance(error, EngineDeadError)
    assert "RuntimeError: broken by the test" in str(error)
    assert "nor does a step without it run" in str(error)
