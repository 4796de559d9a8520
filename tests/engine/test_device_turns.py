"""Who may start on an accelerator beside whom."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.device_turns import DeviceTurns
from vllm_omni.engine.replica_spec import ReplicaSpec


class Starter:
    """Holds its turn until it is told to leave."""

    def __init__(self, turn: AbstractAsyncContextManager[None]) -> None:
        self.leave = asyncio.Event()
        self.is_in = False
        self.task = asyncio.create_task(self._run(turn))

    async def _run(self, turn: AbstractAsyncContextManager[None]) -> None:
        async with turn:
            self.is_in = True
            await self.leave.wait()
        self.is_in = False


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_that_do_not_measure_start_together() -> None:
    turns = DeviceTurns()
    first, second = Starter(turns.together()), Starter(turns.together())
    await settle()
    assert (first.is_in, second.is_in) == (True, True)
    first.leave.set()
    second.leave.set()
    await asyncio.gather(first.task, second.task)


async def test_one_that_measures_is_alone_and_nobody_overtakes_it() -> None:
    turns = DeviceTurns()
    before, measuring, after = (
        Starter(turns.together()),
        Starter(turns.alone()),
        Starter(turns.together()),
    )
    await settle()
    assert (before.is_in, measuring.is_in, after.is_in) == (True, False, False)
    before.leave.set()
    await settle()
    assert (measuring.is_in, after.is_in) == (True, False)
    measuring.leave.set()
    await settle()
    assert after.is_in
    after.leave.set()
    await asyncio.gather(before.task, measuring.task, after.task)


@pytest.mark.parametrize("which", ["together", "alone"])
async def test_a_start_that_is_called_off_leaves_the_device_to_others(which: str) -> None:
    turns = DeviceTurns()
    waits_for = Starter(turns.together())
    called_off = Starter(getattr(turns, which)())
    await settle()
    called_off.task.cancel()
    waits_for.leave.set()
    await asyncio.gather(called_off.task, waits_for.task, return_exceptions=True)
    alone = Starter(turns.alone())
    await settle()
    assert alone.is_in
    alone.leave.set()
    await alone.task


@pytest.mark.parametrize(
    ("kind", "engine_args", "measures"),
    [
        (StageKind.AUTOREGRESSIVE, {}, True),
        (StageKind.AUTOREGRESSIVE, {"kv_cache_memory_bytes": 1 << 30}, False),
        (StageKind.DIFFUSION, {}, True),
        (StageKind.ONE_SHOT, {}, False),
    ],
)
def test_an_engine_that_knows_its_memory_does_not_measure(
    kind: StageKind, engine_args: dict[str, object], measures: bool
) -> None:
    spec = ReplicaSpec(
        stage="s",
        stage_id=0,
        replica_id=0,
        kind=kind,
        model_dir=Path(),
        model_class=None,
        devices=("cuda:0",),
        num_threads=1,
        max_batch_size=1,
        start_timeout_s=1.0,
        engine_args=engine_args,
    )
    assert spec.measures_memory is measures
