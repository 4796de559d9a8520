"""A replica that is alive and does nothing: stopped by a signal, for a while or for good."""

from __future__ import annotations

import time

import pytest

from tests.dfx.reliability.harness import STALL_S, Rig, assert_ended_in_time, note, under_way
from tests.dfx.reliability.processes import ended
from tests.dfx.reliability.requests import STAGES, ask, finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_replica_that_goes_on_again_loses_nothing(rig: Rig, stage: str) -> None:
    pids = rig.server.replicas()
    replicas = rig.replicas_of(stage)
    bystanders = [other for other in STAGES if other != stage]
    async with streaming(rig, [*[stage] * len(replicas), *bystanders], size=150) as streams:
        async with rig.frozen(replicas[0]):
            await under_way(rig.client, [one for one, _ in streams[len(replicas) :]], 10)
        outcomes = await finish(streams)

    assert all(one.succeeded for one in outcomes), [str(one) for one in outcomes]
    assert rig.server.replicas() == pids


@pytest.mark.parametrize("stage", STAGES)
async def test_a_replica_that_stands_still_is_replaced(rig: Rig, stage: str) -> None:
    replicas = rig.replicas_of(stage)
    bystanders = [other for other in STAGES if other != stage]
    async with streaming(rig, [*[stage] * len(replicas), *bystanders], size=150) as streams:
        async with rig.frozen(replicas[0]) as pid:
            frozen_s = time.monotonic()
            await ended(pid, 3 * STALL_S)
            killed_s = time.monotonic() - frozen_s
        outcomes = await finish(streams)
    victims = [one for one in outcomes if not one.succeeded]

    note(f"SIGSTOP of {stage} for good: killed after", f"{killed_s:.1f} s")
    assert [one.kind for one in victims] == [stage], [str(one) for one in outcomes]
    assert victims[0].code == "replica_died", victims[0]
    assert_ended_in_time(outcomes, rig.server.deadline_s)
    await rig.until_whole()
    assert (await ask(rig.client, stage, size=3)).succeeded
