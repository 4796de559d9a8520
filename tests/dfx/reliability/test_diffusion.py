"""The faults of a stage that paints: two replicas of a small model, batched by the denoise step.

Progress is no part of a picture: what dies then is submitted again. A request whose client has
seen a preview fails with its replica.

No chunk of such a stage can be lost: it neither reads nor writes streams, its prompt comes with its
request and its picture with the report of its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.load_client import Outcome
from tests.dfx.reliability.harness import (
    NOTICED_S,
    STALL_S,
    Lateness,
    Rig,
    assert_ended_in_time,
    got_so_far,
    load_average,
    note,
    rate,
    running,
    under_way,
    until,
)
from tests.dfx.reliability.orders import Fault
from tests.dfx.reliability.processes import ended, filled, shared_memory_of
from tests.dfx.reliability.requests import PICTURES, ask, finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]

FIRST, SECOND = f"{PICTURES}/0", f"{PICTURES}/1"
MAX_GAP_S = 0.3
MIN_RATIO = 0.9
ERRORS = [
    pytest.param(Fault.RAISE, (500, "request_failed"), id="exception"),
    pytest.param(Fault.MEMORY, (503, "out_of_memory"), id="memory"),
]
Streams = list[tuple[Outcome, asyncio.Task[Outcome]]]


@asynccontextmanager
async def seen(rig: Rig, *, size: int = 100, pace_ms: int = 20) -> AsyncIterator[Streams]:
    """A request on each replica, of which its client has seen a preview."""
    async with streaming(rig, [PICTURES] * 2, size=size, pace_ms=pace_ms, previews=3) as streams:
        outcomes = [one for one, _ in streams]
        await got_so_far(rig.client, outcomes, lambda one: one.num_previews > 0)
        yield streams


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if not one.succeeded]


def only_victim(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that failed."""
    victims = failed(outcomes)
    assert len(victims) == 1, [str(one) for one in outcomes]
    return victims[0]


async def works(rig: Rig) -> None:
    outcome = await ask(rig.client, PICTURES, size=3)
    assert outcome.succeeded, outcome


async def num_resubmitted(rig: Rig) -> float:
    return sum((await rig.figure("requests_resubmitted_total", stage=PICTURES)).values())


async def test_a_kill_fails_what_was_seen_and_paints_anew_what_was_not(painter: Rig) -> None:
    num_restarts = await painter.num_restarts(FIRST)
    num_before = await num_resubmitted(painter)
    async with (
        seen(painter, size=160, pace_ms=40) as heard,
        streaming(painter, [PICTURES] * 2, size=40) as unheard,
    ):
        with Lateness() as late:
            killed_s = await painter.kill(FIRST)
            back = asyncio.create_task(painter.comes_back(FIRST, num_restarts))
            await asyncio.wait({task for _, task in heard}, return_when="FIRST_COMPLETED")
        with Lateness() as later:
            outcomes, again = await finish(heard), await finish(unheard)
            back_s = await back
    victim = only_victim(outcomes)
    (survivor,) = [one for one in outcomes if one.succeeded]
    worst = max(late, later, key=lambda one: one.worst_s)
    told_s = victim.ended_s - killed_s
    gap_s = survivor.longest_gap_s(killed_s, survivor.ended_s)

    assert victim.code == "replica_died"
    assert FIRST in victim.message
    note(f"SIGKILL of {PICTURES}: error at the client after", f"{told_s * 1000:.0f} ms{late}")
    assert told_s < NOTICED_S + late.allowance_s
    assert not failed(again), [str(one) for one in again]
    assert await num_resubmitted(painter) == num_before + 1
    note(f"neighbour of {FIRST} while it restarts: longest gap", f"{gap_s * 1000:.0f} ms{worst}")
    assert gap_s < MAX_GAP_S + worst.allowance_s
    assert_ended_in_time([*outcomes, *again], painter.server.deadline_s)
    await painter.assert_in_time(FIRST, back_s - killed_s, worst)
    await painter.until_whole()
    await works(painter)


async def test_the_other_replica_is_as_fast_while_one_restarts(painter: Rig) -> None:
    # Mostly pauses: what is asked is whether it is held up, not who gets the processors.
    async with streaming(painter, [PICTURES] * 2, size=120, pace_ms=80, previews=3) as streams:
        outcomes = [one for one, _ in streams]
        begun_s = time.monotonic()
        await under_way(painter.client, outcomes, 25)
        await got_so_far(painter.client, outcomes, lambda one: one.num_previews > 0)
        killed_s = await painter.kill(FIRST)
        whole = asyncio.create_task(painter.until_whole())
        await finish(streams)
    await whole

    assert only_victim(outcomes).code == "replica_died"
    survivors = [one for one in outcomes if one.succeeded]
    until_s = survivors[0].chunk_times_s[-1]
    ratio = rate(survivors, killed_s, until_s) / rate(survivors, begun_s, killed_s)
    note(
        f"neighbour of {FIRST}: throughput against before the kill",
        f"{ratio:.2f} ({load_average()})",
    )
    assert ratio >= MIN_RATIO


async def test_without_replicas_it_is_in_health_and_refuses(painter: Rig) -> None:
    async def is_red() -> bool:
        status, body = await painter.health()
        return status == 503 and body["stages"][PICTURES] == "dead"

    async with streaming(painter, [PICTURES] * 2, size=200) as streams:
        with Lateness() as late:
            killed_s = painter.kill_all(PICTURES)
            await until(is_red, 10.0, "/health is 503")
            red_s = time.monotonic() - killed_s
        refused = await ask(painter.client, PICTURES, size=3)
        outcomes = await finish(streams)

    note(f"SIGKILL of all of {PICTURES}: /health is 503 after", f"{red_s * 1000:.0f} ms{late}")
    assert red_s < NOTICED_S + late.allowance_s
    assert (refused.status, refused.code) == (503, "stage_unavailable"), refused
    assert refused.message == f"Stage-0 has no live replica ({PICTURES})"
    assert refused.duration_s < NOTICED_S + late.allowance_s
    known = {"replica_died", "stage_unavailable"}
    assert {one.code for one in outcomes} <= known, [str(one) for one in outcomes]
    assert max(one.ended_s for one in outcomes) - killed_s < NOTICED_S + late.allowance_s
    await painter.until_whole()
    note(f"SIGKILL of all of {PICTURES}: serving after", f"{time.monotonic() - killed_s:.1f} s")
    await works(painter)


async def test_a_replica_that_goes_on_again_loses_nothing(painter: Rig) -> None:
    pids = painter.server.replicas()
    async with streaming(painter, [PICTURES] * 2, size=60) as streams:
        async with painter.frozen(FIRST):
            now_s = time.monotonic()
            async with asyncio.timeout(20):
                await asyncio.wait({task for _, task in streams}, return_when="FIRST_COMPLETED")
            stood_still_s = time.monotonic() - now_s
        outcomes = await finish(streams)

    assert stood_still_s < STALL_S
    assert not failed(outcomes), [str(one) for one in outcomes]
    assert painter.server.replicas() == pids


async def test_a_replica_that_stands_still_is_replaced(painter: Rig) -> None:
    async with seen(painter, size=160, pace_ms=40) as streams:
        async with painter.frozen(FIRST) as pid:
            frozen_s = time.monotonic()
            await ended(pid, 3 * STALL_S)
            killed_s = time.monotonic() - frozen_s
        outcomes = await finish(streams)
    victim = only_victim(outcomes)

    note(f"SIGSTOP of {PICTURES} for good: killed after", f"{killed_s:.1f} s")
    assert killed_s >= STALL_S - 1
    assert victim.code == "replica_died"
    assert FIRST in victim.message
    assert_ended_in_time(outcomes, painter.server.deadline_s)
    await painter.until_whole()
    await works(painter)


@pytest.mark.parametrize(("fault", "answer"), ERRORS)
@pytest.mark.parametrize("step", [0, 3])
async def test_one_of_six_fails_alone(
    painter: Rig, fault: Fault, answer: tuple[int, str], step: int
) -> None:
    """Three share a batch."""
    painter.server.needs_orders()
    pids = painter.server.replicas()
    async with streaming(painter, [PICTURES] * 5, size=40) as streams:
        bad = await ask(painter.client, PICTURES, fault, step, size=60)
        others = await finish(streams)

    # Once the answer has begun its status is said: the error is an event in it.
    assert (bad.status, bad.code) in ((200, answer[1]), answer), bad
    assert bad.message.startswith(f"stage {PICTURES} ")
    assert "ordered by the test" in bad.message
    assert not failed(others), [str(one) for one in others]
    await works(painter)
    assert painter.server.replicas() == pids


async def test_a_batch_without_memory_goes_on_in_halves(painter: Rig) -> None:
    painter.server.needs_orders()
    pids = painter.server.replicas()
    outcomes = await asyncio.gather(
        *(ask(painter.client, PICTURES, Fault.CROWDED, 2, size=20) for _ in range(8))
    )

    assert not failed(outcomes), [str(one) for one in outcomes]
    assert painter.server.replicas() == pids


async def test_a_decode_without_memory_is_done_in_tiles_or_fails_alone(painter: Rig) -> None:
    painter.server.needs_orders()
    pids = painter.server.replicas()
    async with streaming(painter, [PICTURES] * 2, size=60) as streams:
        in_tiles = await ask(painter.client, PICTURES, Fault.DECODE, 0, size=3)
        never = await ask(painter.client, PICTURES, Fault.DECODE, 1, size=3)
        others = await finish(streams)

    assert in_tiles.succeeded, in_tiles
    assert never.code == "out_of_memory", never
    assert not failed(others), [str(one) for one in others]
    await works(painter)
    assert painter.server.replicas() == pids


async def test_a_slow_step_is_late_on_its_replica_only(painter: Rig) -> None:
    painter.server.needs_orders()
    with Lateness() as late:
        async with streaming(painter, [PICTURES] * 2, size=120) as streams:
            slow = await ask(painter.client, PICTURES, Fault.HANG, 2000, size=20)
            others = await finish(streams)
    gaps_s = [other.longest_gap_s(slow.started_s, slow.ended_s) for other in others]

    assert slow.succeeded, slow
    assert slow.duration_s > 2
    assert not failed(others), [str(one) for one in others]
    note(
        f"slow step of {PICTURES}: longest gap on the other replica", f"{min(gaps_s) * 1e3:.0f} ms"
    )
    assert min(gaps_s) < MAX_GAP_S + late.allowance_s
    assert max(gaps_s) > 1.5  # it shared the step


async def test_a_client_that_leaves_is_an_abort_within_a_step(painter: Rig) -> None:
    left = await asyncio.gather(
        *(painter.client.picture("A small clock.", steps=1000, leave_after=10) for _ in range(4))
    )
    with Lateness() as late:
        took_s = await until(painter.is_idle, 5.0, "no stage has a request")

    assert all(one.left for one in left), [str(one) for one in left]
    assert took_s < NOTICED_S + late.allowance_s


async def test_a_model_that_raises_for_everybody_is_a_death_with_its_own_error(
    painter: Rig,
) -> None:
    painter.server.needs_orders()
    async with streaming(painter, [PICTURES] * 2, size=200) as streams:
        outcomes = [await ask(painter.client, PICTURES, Fault.BREAK, 3, size=20)]
        # A few failures are taken for those of requests before the model is put to the test.
        while "RuntimeError: broken by the test" not in await painter.last_errors(PICTURES):
            assert len(outcomes) < 20, [str(one) for one in outcomes]
            outcomes.append(await ask(painter.client, PICTURES, size=3))
        others = await finish(streams)

    known = {"", "request_failed", "replica_died"}
    assert {one.code for one in outcomes} <= known, [str(one) for one in outcomes]
    assert outcomes[0].code == "request_failed"
    # It shared the batch with the one that broke the model.
    assert only_victim(others).code == "request_failed"
    await painter.until_whole()
    await works(painter)


async def test_a_replica_whose_every_connection_is_cut_is_dead(painter: Rig) -> None:
    painter.server.needs_orders()
    async with running(ask(painter.client, PICTURES, size=120)) as (bystander,):
        await until(lambda: painter.client.num_open == 1, 10.0, "it was sent")
        cut = await ask(painter.client, PICTURES, Fault.CUT_ALL, 30, size=60, previews=3)
        other = await bystander

    assert cut.num_previews, cut
    assert cut.code == "replica_died", cut
    assert cut.duration_s < painter.server.deadline_s / 2
    assert other.succeeded, other
    await painter.until_whole()
    await works(painter)


async def test_a_full_shared_memory_is_nobodys_problem(painter: Rig) -> None:
    if not painter.server.shm_is_small or painter.server.pid is None:
        pytest.skip("needs a server whose /dev/shm is its own")
    with filled(shared_memory_of(painter.server.pid)):
        async with streaming(painter, [PICTURES] * 4, size=40) as streams:
            outcomes = await finish(streams)
        assert not failed(outcomes), [str(one) for one in outcomes]
        num_restarts = await painter.num_restarts(FIRST)
        await painter.kill(FIRST)
        await painter.comes_back(FIRST, num_restarts)
        await painter.until_whole()
        await works(painter)
