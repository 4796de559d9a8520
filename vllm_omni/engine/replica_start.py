"""Starting one replica after it was decided.

An engine that measures an accelerator's memory while it loads has that accelerator for itself; all
others start at once. Runs on the orchestrator's loop.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

from vllm_omni.engine.device_turns import DeviceTurns
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.replica_state import Replica
from vllm_omni.engine.stage_client import StageClient

logger = logging.getLogger(__name__)

StartReplica: TypeAlias = Callable[[ReplicaSpec], Awaitable[StageClient]]


class ReplicaStarter:
    """Starts incarnations of replicas, whoever asks."""

    def __init__(self, start: StartReplica, clock: Callable[[], float]) -> None:
        self._start = start
        self._clock = clock
        self._turns: defaultdict[str, DeviceTurns] = defaultdict(DeviceTurns)

    async def start(self, replica: Replica) -> StageClient:
        """Start the incarnation that the replica is at; returns when a real request went through.

        Raises:
            OmniError: it did not become ready; its own error on one line.
        """
        spec = replica.next_spec()
        async with AsyncExitStack() as held:
            for device in sorted(set(spec.devices)):
                if device != "cpu":
                    turns = self._turns[device]
                    turn = turns.alone() if spec.measures_memory else turns.together()
                    await held.enter_async_context(turn)
            began_s = self._clock()
            client = await self._start(spec)
        replica.start_took_s = self._clock() - began_s
        logger.info(
            "stage=%s replica=%d ready in %.1f s",
            spec.stage,
            spec.replica_id,
            replica.start_took_s,
        )
        return client
