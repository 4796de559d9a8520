"""Rows that two ranks share out give the latents that one rank computes.

The ranks are threads here, each with a pipeline of its own. A row in a smaller forward is summed
in another order: each side may be as far from the reference as `test_step_pipelines.py` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.diffusion.distributed.meeting import Meetings
from tests.parity.diffusion.cases import CASES, Case, context_of
from tests.parity.diffusion.test_step_pipelines import PROMPTS, TOLERANCE, begin, finish, tick

pytestmark = pytest.mark.slow

NUM_RANKS = 2
APART = 2 * TOLERANCE
CHOSEN = [case for case in CASES if case.variant != "edit"]
"""Editing scales its pictures up, which takes a minute here, and steps as Qwen-Image does."""


class Replica(NamedTuple):
    case: Case
    one: Any
    several: Sequence[Any]
    meetings: Meetings


@pytest.fixture(scope="module", params=CHOSEN, ids=str)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Replica:
    case: Case = request.param
    model_dir = case.make(tmp_path_factory.mktemp("tiny") / "model", seed=1)
    meetings = Meetings(NUM_RANKS)
    one = case.load(model_dir)
    pipeline_class, context = type(one), context_of(model_dir)
    several = [
        pipeline_class(replace(context, ranks=meetings.exchange(rank))) for rank in range(NUM_RANKS)
    ]
    return Replica(case, one, several, meetings)


def staggered(case: Case, pipeline: Any) -> list[torch.Tensor]:
    """Final latents of requests that each came a step later; one left in the middle."""
    with torch.inference_mode():
        running: list[Any] = []
        for i, prompt in enumerate(PROMPTS):
            running.append(begin(pipeline, case.request(10 + i, prompt, steps=3 + i)))
            tick(pipeline, running)
        del running[1]
        finish(pipeline, running)
        return [pipeline.final_latents(state) for state in running]


def in_ranks(replica: Replica, work: Any) -> list[Any]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(work, replica.several))


def rows_of(pipeline: Any) -> list[int]:
    """Grows by the rows of each forward of its denoisers."""
    counted: list[int] = []
    whole = pipeline.forward

    def forward(states: Any, latents: Any, timesteps: Any, rows: Any) -> Any:
        counted.append(len(rows))
        return whole(states, latents, timesteps, rows)

    pipeline.forward = forward
    return counted


def test_one_request_is_one_row_for_each_rank_where_it_is_guided(replica: Replica) -> None:
    request = replica.case.request(1, PROMPTS[0], steps=3)

    def work(pipeline: Any) -> torch.Tensor:
        with torch.inference_mode():
            state = begin(pipeline, request)
            finish(pipeline, [state])
            return pipeline.final_latents(state)

    counted = [rows_of(pipeline) for pipeline in replica.several]
    first, second = in_ranks(replica, work)
    for pipeline in replica.several:
        del pipeline.forward

    is_guided = replica.one.is_guided(request)
    assert counted == [[1, 1, 1], [1, 1, 1] if is_guided else []]
    assert torch.equal(first, second)
    assert (first - work(replica.one)).abs().max() <= APART


def test_four_that_come_a_step_apart_while_one_leaves(replica: Replica) -> None:
    ranks = in_ranks(replica, lambda pipeline: staggered(replica.case, pipeline))

    for latents, *others in zip(staggered(replica.case, replica.one), *ranks, strict=True):
        for other in others:
            assert (other - latents).abs().max() <= APART


def test_a_rank_whose_schedule_fails_leaves_all_ranks_where_they_were(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state_of(pipeline: Any) -> Any:
        with torch.inference_mode():
            return begin(pipeline, replica.case.request(3, PROMPTS[2], steps=3))

    states = in_ranks(replica, state_of)
    bad = states[1].schedule
    step = type(bad).step

    def fail(schedule: Any, *arguments: Any, **options: Any) -> Any:
        if schedule.timesteps is bad.timesteps:
            raise torch.OutOfMemoryError("no memory")
        return step(schedule, *arguments, **options)

    def attempt(pipeline: Any) -> str:
        with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError) as caught:
            pipeline.denoise_step([states[replica.several.index(pipeline)]])
        return str(caught.value)

    def go_on(pipeline: Any) -> torch.Tensor:
        state = states[replica.several.index(pipeline)]
        with torch.inference_mode():
            finish(pipeline, [state])
            return pipeline.final_latents(state)

    with monkeypatch.context() as patch:
        patch.setattr(type(bad), "step", fail)
        assert in_ranks(replica, attempt) == ["rank 1: OutOfMemoryError: no memory", "no memory"]
    assert [state.step_index for state in states] == [0, 0]
    first, second = in_ranks(replica, go_on)
    assert torch.equal(first, second)
