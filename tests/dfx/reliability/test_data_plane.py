"""What goes wrong between replicas: lost chunks and ends, cut connections, a full /dev/shm."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load_client import LoadClient, Outcome
from tests.dfx.reliability.harness import (
    NOTICED_S,
    Lateness,
    Rig,
    note,
    running,
    under_way,
    until,
)
from tests.dfx.reliability.orders import Fault, seed_for
from tests.dfx.reliability.processes import filled, shared_memory_of
from tests.dfx.reliability.requests import PACE_MS, STAGES, ask, finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]


async def spoken(
    client: LoadClient,
    fault: Fault = Fault.PACE,
    value: int = PACE_MS,
    *,
    max_tokens: int = 100,
    leave_after: int = 0,
    into: Outcome | None = None,
) -> Outcome:
    """A chat whose text goes from the thinker to the voice while it is written."""
    return await client.chat(
        "Say something.",
        max_tokens=max_tokens,
        seed=seed_for(fault, value),
        audio=True,
        leave_after=leave_after,
        into=into,
    )


async def test_a_lost_chunk_fails_its_request_alone(rig: Rig) -> None:
    rig.server.needs_orders()
    async with running(*(spoken(rig.client) for _ in range(3))) as tasks:
        failed = await spoken(rig.client, Fault.LOSE_CHUNK, 10)
        others = await asyncio.gather(*tasks)

    assert failed.code == "request_failed", failed
    assert failed.message == (
        "stage voice waited for the next chunk of the stream of stage thinker: "
        "frame 11 arrived where 10 was due"
    )
    assert failed.duration_s < rig.server.deadline_s / 2
    assert all(other.succeeded for other in others), [str(other) for other in others]
    assert (await spoken(rig.client)).succeeded


async def test_a_lost_end_is_noticed_soon_after_its_stage_has_finished(rig: Rig) -> None:
    rig.server.needs_orders()
    failed = await spoken(rig.client, Fault.LOSE_END)

    assert failed.code == "request_failed", failed
    assert failed.message == (
        "stage voice waited 5 s for the next chunk or the end of the stream of stage thinker, "
        "which has finished writing"
    )
    silent_s = failed.ended_s - failed.chunk_times_s[-1]
    note("lost end: told after a silence of", f"{silent_s:.1f} s")
    assert silent_s < rig.server.deadline_s / 2
    assert (await spoken(rig.client)).succeeded


@pytest.mark.parametrize("stage", STAGES)
async def test_a_replica_whose_every_connection_is_cut_is_dead(rig: Rig, stage: str) -> None:
    rig.server.needs_orders()
    bystanders = [other for other in STAGES if other != stage]
    async with streaming(rig, bystanders) as streams:
        cut = await ask(rig.client, stage, Fault.CUT_ALL, 3)
        others = await finish(streams)

    assert cut.code == "replica_died", cut
    assert cut.duration_s < rig.server.deadline_s / 2
    assert all(other.succeeded for other in others), [str(other) for other in others]
    await rig.until_whole()
    assert (await ask(rig.client, stage, size=3)).succeeded


async def test_a_cut_connection_fails_what_went_through_it(rig: Rig) -> None:
    rig.server.needs_orders()
    pids = rig.server.replicas()
    async with streaming(rig, STAGES) as streams:
        failed = await spoken(rig.client, Fault.CUT_SOCKETS, 10)
        others = await finish(streams)

    assert failed.code in ("request_failed", "replica_died"), failed
    assert failed.duration_s < rig.server.deadline_s / 2
    assert all(other.succeeded for other in others), [str(other) for other in others]
    again = await asyncio.gather(*(spoken(rig.client) for _ in range(4)))
    assert all(one.succeeded for one in again), [str(one) for one in again]
    assert rig.server.replicas() == pids


async def test_a_client_that_leaves_is_an_abort_everywhere(rig: Rig) -> None:
    left = await asyncio.gather(
        *(spoken(rig.client, max_tokens=400, leave_after=40) for _ in range(4))
    )
    with Lateness() as late:
        took_s = await until(rig.is_idle, 5.0, "no stage has a request")

    assert all(one.left for one in left)
    note("client leaves at 10 %: every stage is idle after", f"{took_s * 1000:.0f} ms")
    assert took_s < NOTICED_S + late.allowance_s


async def test_a_full_shared_memory_is_nobodys_problem(rig: Rig) -> None:
    if not rig.server.shm_is_small or rig.server.pid is None:
        pytest.skip("needs a server whose /dev/shm is its own")
    pids = rig.server.replicas()
    outcomes = [Outcome("chat with audio") for _ in range(4)]
    with filled(shared_memory_of(rig.server.pid)):
        async with (
            streaming(rig, STAGES) as streams,
            running(*(spoken(rig.client, into=one) for one in outcomes)) as tasks,
        ):
            await under_way(rig.client, outcomes)
            ended = [*await asyncio.gather(*tasks), *await finish(streams)]
        assert all(one.succeeded for one in ended), [str(one) for one in ended]
        num_restarts = await rig.num_restarts("voice/0")
        await rig.kill("voice/0")
        await rig.comes_back("voice/0", num_restarts)
    assert rig.server.replicas().keys() == pids.keys()
