"""Starting every replica of a pipeline: stages side by side, one at a time on an accelerator.

Runs on the orchestrator's loop. A failure stops what had started and what was starting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.stage_pool import StagePool

logger = logging.getLogger(__name__)

StartReplica: TypeAlias = Callable[[ReplicaSpec], Awaitable[StageClient]]


async def start_replicas(
    specs: Sequence[ReplicaSpec],
    pools: Sequence[StagePool],
    start: StartReplica,
    metrics: EngineMetrics,
) -> None:
    """Start all replicas and attach each to its pool.

    Memory on an accelerator is measured while an engine loads, so replicas that share one start
    after each other; all others start at once.

    Raises:
        OmniError: the first replica that failed; whatever else started was told to stop.
    """
    locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
    try:
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(
                    _start_one(spec, pools[spec.stage_id], start, locks, metrics),
                    name=f"start {spec.name}",
                )
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _start_one(
    spec: ReplicaSpec,
    pool: StagePool,
    start: StartReplica,
    locks: Mapping[str, asyncio.Lock],
    metrics: EngineMetrics,
) -> None:
    metrics.replica_state(spec.stage, spec.replica_id, "starting")
    async with AsyncExitStack() as held:
        for device in sorted(set(spec.devices)):
            if device != "cpu":
                await held.enter_async_context(locks[device])
        began_s = time.monotonic()
        client = await start(spec)
        logger.info(
            "stage=%s replica=%d ready in %.1f s",
            spec.stage,
            spec.replica_id,
            time.monotonic() - began_s,
        )
    pool.attach_replica(spec.replica_id, client)
