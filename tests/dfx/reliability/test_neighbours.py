"""A replica dies and restarts; streams on its neighbour do not notice."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.dfx.reliability.harness import Lateness, Rig, load_average, note, rate, under_way
from tests.dfx.reliability.requests import finish, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]

MAX_GAP_S = 0.3
MIN_RATIO = 0.9


@pytest.mark.parametrize("stage", ["thinker", "voice"])
async def test_streams_of_the_other_replica_go_on(rig: Rig, stage: str) -> None:
    async with streaming(rig, [stage] * 4, size=200, pace_ms=40) as streams:
        outcomes = [one for one, _ in streams]
        begun_s = time.monotonic()
        await under_way(rig.client, outcomes, 40)
        with Lateness() as late:
            killed_s = await rig.kill(f"{stage}/0")
            whole = asyncio.create_task(rig.until_whole())
            await finish(streams)
        await whole
    survivors = [one for one in outcomes if one.succeeded]

    assert len(survivors) == 2, [str(one) for one in outcomes]
    until_s = min(one.chunk_times_s[-1] for one in survivors)
    gap_s = max(one.longest_gap_s(killed_s, until_s) for one in survivors)
    before_gap_s = max(one.longest_gap_s(begun_s, killed_s) for one in survivors)
    ratio = rate(survivors, killed_s, until_s) / rate(survivors, begun_s, killed_s)
    note(
        f"neighbour of {stage}/0 while it restarts: longest gap (before the kill)",
        f"{gap_s * 1000:.0f} ms ({before_gap_s * 1000:.0f} ms), this process up to "
        f"{late.worst_s * 1000:.0f} ms late, {load_average()}",
    )
    note(f"neighbour of {stage}/0: throughput against before the kill", f"{ratio:.2f}")
    assert gap_s < MAX_GAP_S + late.allowance_s
    assert ratio >= MIN_RATIO
