"""Exceptions, errors of memory and slow steps inside a stage."""

from __future__ import annotations

import asyncio

import pytest

from tests.dfx.reliability.harness import (
    Lateness,
    Rig,
    assert_ended_in_time,
    note,
    running,
)
from tests.dfx.reliability.orders import Fault
from tests.dfx.reliability.requests import STAGES, ask, finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]

ERRORS = [
    pytest.param(Fault.RAISE, (500, "request_failed"), id="exception"),
    pytest.param(Fault.MEMORY, (503, "out_of_memory"), id="memory"),
]


@pytest.mark.parametrize(("fault", "answer"), ERRORS)
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("stage", STAGES)
async def test_one_of_six_fails_alone(
    rig: Rig, stage: str, fault: Fault, answer: tuple[int, str], step: int
) -> None:
    rig.server.needs_orders()
    pids = rig.server.replicas()
    async with streaming(rig, [stage] * 5, size=40) as streams:
        failed = await ask(rig.client, stage, fault, step, size=60)
        others = await finish(streams)

    # Once the answer has begun its status is said: the error is an event in it.
    assert (failed.status, failed.code) in ((200, answer[1]), answer), failed
    assert stage in failed.message
    assert "ordered by the test" in failed.message
    assert all(other.succeeded for other in others), [str(other) for other in others]
    assert (await ask(rig.client, stage, size=3)).succeeded
    assert rig.server.replicas() == pids


@pytest.mark.parametrize("stage", STAGES)
async def test_a_model_that_raises_for_everybody_is_a_death_with_its_own_error(
    rig: Rig, stage: str
) -> None:
    rig.server.needs_orders()
    bystanders = [other for other in STAGES if other != stage]
    async with streaming(rig, bystanders, size=150) as streams:
        outcomes = [await ask(rig.client, stage, Fault.BREAK, 3)]
        # The voice takes a few failures for those of requests before it tests its model.
        while "RuntimeError: broken by the test" not in await rig.last_errors(stage):
            assert len(outcomes) < 20, outcomes
            outcomes.append(await ask(rig.client, stage, size=3))
        others = await finish(streams)

    known = {"", "request_failed", "replica_died", "stage_unavailable"}
    assert {one.code for one in outcomes} <= known, [str(one) for one in outcomes]
    assert all(other.succeeded for other in others), [str(other) for other in others]
    await rig.until_whole()
    assert (await ask(rig.client, stage, size=3)).succeeded


@pytest.mark.parametrize("stage", ["thinker", "voice"])
async def test_a_slow_step_is_late_on_its_replica_only(rig: Rig, stage: str) -> None:
    rig.server.needs_orders()
    with Lateness() as late:
        async with streaming(rig, [stage] * 2) as streams:
            slow = await ask(rig.client, stage, Fault.HANG, 2000, size=20)
            others = await finish(streams)

    assert slow.succeeded, slow
    assert slow.duration_s > 2
    assert all(other.succeeded for other in others), [str(other) for other in others]
    gaps_s = [other.longest_gap_s(slow.started_s, slow.ended_s) for other in others]
    gap_s = min(gaps_s)
    note(f"slow step of {stage}: longest gap on the other replica", f"{gap_s * 1000:.0f} ms")
    assert gap_s < 0.3 + late.allowance_s, (gaps_s, [str(one) for one in (slow, *others)])


async def test_a_slow_step_of_the_only_replica_is_late_in_its_stage_only(rig: Rig) -> None:
    rig.server.needs_orders()
    bystanders = [other for other in STAGES if other != "asr"]
    with Lateness() as late:
        async with streaming(rig, bystanders, size=150) as streams:
            slow = await ask(rig.client, "asr", Fault.HANG, 2000, size=20)
            others = await finish(streams)

    assert slow.succeeded, slow
    assert slow.duration_s > 2
    gap_s = max(other.longest_gap_s(slow.started_s, slow.ended_s) for other in others)
    note("slow step of asr: longest gap in the other stages", f"{gap_s * 1000:.0f} ms")
    assert all(other.succeeded for other in others), [str(other) for other in others]
    assert gap_s < 0.3 + late.allowance_s


async def test_requests_in_one_batch_all_get_their_answer_when_its_memory_runs_out(
    rig: Rig,
) -> None:
    rig.server.needs_orders()
    faults = [Fault.MEMORY, Fault.RAISE] * 2 + [Fault.PACE] * 4
    async with running(*(ask(rig.client, "voice", fault, 2, size=10) for fault in faults)) as tasks:
        outcomes = await asyncio.gather(*tasks)

    expected = {Fault.MEMORY: "out_of_memory", Fault.RAISE: "request_failed", Fault.PACE: ""}
    assert [one.code for one in outcomes] == [expected[fault] for fault in faults]
    assert_ended_in_time(outcomes, rig.server.deadline_s)
