"""SIGKILL of a replica: who fails, how, how soon; who does not; and that it comes back."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.load_client import Outcome
from tests.dfx.reliability.harness import NOTICED_S, Lateness, Rig, note, running, until
from tests.dfx.reliability.orders import Fault
from tests.dfx.reliability.requests import STAGES, ask, finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_kill_fails_what_the_replica_streams_and_nothing_else(rig: Rig, stage: str) -> None:
    replicas = rig.replicas_of(stage)
    bystanders = [other for other in STAGES if other != stage]
    async with streaming(rig, [*[stage] * len(replicas), *bystanders], size=200) as streams:
        num_restarts = await rig.num_restarts(replicas[0])
        with Lateness() as late:
            killed_s = await rig.kill(replicas[0])
            back = asyncio.create_task(rig.comes_back(replicas[0], num_restarts))
            await asyncio.wait(
                {task for _, task in streams[: len(replicas)]}, return_when="FIRST_COMPLETED"
            )
        with Lateness() as later:
            outcomes = await finish(streams)
            back_s = await back
    victims = [one for one in outcomes if not one.succeeded]

    assert [one.kind for one in victims] == [stage], [str(one) for one in outcomes]
    assert victims[0].code == "replica_died"
    assert f"{stage}/" in victims[0].message
    told_s = victims[0].ended_s - killed_s
    note(f"SIGKILL of {stage}: error at the client after", f"{told_s * 1000:.0f} ms{late}")
    assert told_s < NOTICED_S + late.allowance_s
    worst = max(late, later, key=lambda one: one.worst_s)
    await rig.assert_in_time(replicas[0], back_s - killed_s, worst)
    await rig.until_whole()
    assert (await ask(rig.client, stage, size=3)).succeeded


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_without_replicas_is_in_health_and_refuses(rig: Rig, stage: str) -> None:
    async def is_red() -> bool:
        status, body = await rig.health()
        return status == 503 and body["stages"][stage] != "ready"

    with Lateness() as late:
        killed_s = rig.kill_all(stage)
        await until(is_red, 10.0, "/health is 503")
        red_s = time.monotonic() - killed_s
    refused = await ask(rig.client, stage, size=3)
    others = [await ask(rig.client, other, size=3) for other in STAGES if other != stage]

    note(f"SIGKILL of all of {stage}: /health is 503 after", f"{red_s * 1000:.0f} ms{late}")
    assert red_s < NOTICED_S + late.allowance_s
    assert (refused.status, refused.code) == (503, "stage_unavailable"), refused
    assert refused.duration_s < NOTICED_S + late.allowance_s
    assert all(other.succeeded for other in others), [str(other) for other in others]
    await rig.until_whole()
    note(f"SIGKILL of all of {stage}: serving after", f"{time.monotonic() - killed_s:.1f} s")
    assert (await ask(rig.client, stage, size=3)).succeeded


@pytest.mark.parametrize("stage", ["thinker", "voice"])
async def test_what_nobody_has_heard_yet_is_said_by_the_other_replica(rig: Rig, stage: str) -> None:
    rig.server.needs_orders()
    outcomes = [Outcome(stage), Outcome(stage)]
    slow = (ask(rig.client, stage, Fault.PACE, 1500, size=2, into=one) for one in outcomes)
    async with running(*slow) as tasks:
        await until(lambda: has_requests(rig, stage, 2), 10.0, "both requests are in the stage")
        await rig.kill(f"{stage}/0")
        await asyncio.gather(*tasks)

    assert all(one.succeeded for one in outcomes), [str(one) for one in outcomes]
    await rig.until_whole()


async def has_requests(rig: Rig, stage: str, count: int) -> bool:
    in_flight = await rig.figure("requests_in_flight")
    return in_flight[f"{stage}/"] >= count
