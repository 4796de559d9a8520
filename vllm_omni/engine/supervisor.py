"""The supervisor: starts replicas, hears of their deaths, and brings them back within a budget.

Runs on the orchestrator's loop. A replica is one at a time in the hands of one task; every
transition is `Replica.become`. Clock and sleep are given, so that tests need no time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.fault_isolation import dead_text
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.replica_death import ReplicaDeadError
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.replica_start import ReplicaStarter, StartReplica
from vllm_omni.engine.replica_state import Replica, ReplicaState, ReplicaStatus
from vllm_omni.engine.restart import RestartBudget, RestartPolicy
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.stall import StallWatch
from vllm_omni.errors import ReplicaStateError, UnknownReplicaError

logger = logging.getLogger(__name__)

MAX_LOOK_INTERVAL_S = 5.0
"""How often each replica is looked at, unless a stage has a short `stall_timeout_s`."""
STOP_GRACE_S = 10.0
"""How long a replica that was drained may take to end by itself."""


class Orchestration(Protocol):
    """What the supervisor needs of the orchestrator."""

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run work as long as the orchestrator runs."""

    def attach_replica(self, stage_id: int, replica_id: int, client: StageClient) -> None:
        """Give a replica that is ready its place, and listen to it."""

    async def evict_replica(self, stage_id: int, replica_id: int, error: EngineDeadError) -> None:
        """Take a replica out and fail the requests that depend on it."""

    async def stage_given_up(self, stage_id: int) -> None:
        """Nothing brings a replica of this stage back: nobody may wait for one."""


class Supervisor:
    """All replicas of all stages."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        pools: Sequence[StagePool],
        start: StartReplica,
        policies: Sequence[RestartPolicy],
        metrics: EngineMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`pools` and `policies` by stage id."""
        self._pools = pools
        self._metrics = metrics
        self._policies = policies
        self._clock = clock
        self._sleep = sleep
        self._starter = ReplicaStarter(start, clock)
        self._replicas = {
            (spec.stage_id, spec.replica_id): Replica(
                spec, RestartBudget(policies[spec.stage_id], clock), clock, self._on_change
            )
            for spec in specs
        }
        self._watched: dict[Replica, tuple[StageClient, StallWatch]] = {}
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._orchestration: Orchestration | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{one.name} {one.state}" for one in self._replicas.values())
        return f"<Supervisor [{states}]>"

    def statuses(self) -> list[ReplicaStatus]:
        """Every replica, in the order of stages and slots. Any thread."""
        return [replica.status() for replica in self._replicas.values()]

    def _on_change(self, replica: Replica) -> None:
        self._metrics.replica_state(replica.stage, replica.replica_id, str(replica.state))

    # The first start.

    async def start_all(self) -> None:
        """Start every replica, side by side where devices allow.

        Raises:
            OmniError: the first that failed; whatever else was starting was told to stop.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas.values():
                    group.create_task(self._first_start(replica), name=f"start {replica.name}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _first_start(self, replica: Replica) -> None:
        replica.become(ReplicaState.STARTING)
        client = await self._starter.start(replica)
        self._pool(replica).attach_replica(replica.replica_id, client)
        self._serves(replica)

    def begin(self, orchestration: Orchestration) -> None:
        """The orchestrator runs: from now on deaths are answered."""
        self._orchestration = orchestration

    # Deaths.

    def replica_died(self, stage_id: int, replica_id: int, text: str) -> None:
        """A replica was evicted. Returns at once; it is started again after its back-off."""
        replica = self._replicas[stage_id, replica_id]
        if replica.state is ReplicaState.DRAINING:
            replica.last_error = text
            return  # whoever drains it goes on
        self._fail(replica, text)
        if replica.is_waiting:
            self._take_in_hand(replica, self._bring_back(replica))

    def expects(self, stage_id: int, by_s: float) -> bool:
        """Whether a replica of this stage serves now or is due before then."""
        times = (
            replica.expected_s()
            for replica in self._replicas.values()
            if replica.stage_id == stage_id
        )
        return any(expected_s is not None and expected_s < by_s for expected_s in times)

    # Hangs.

    async def watch(self) -> None:
        """Kill replicas that are alive and stand still, so that they count as dead."""
        timeouts = [policy.stall_timeout_s for policy in self._policies if policy.stall_timeout_s]
        if not timeouts:
            return
        interval_s = min(MAX_LOOK_INTERVAL_S, min(timeouts) / 8)
        while True:
            await self._sleep(interval_s)
            for replica in self._replicas.values():
                if replica.is_serving:
                    await self._look_at(replica)

    async def _look_at(self, replica: Replica) -> None:
        assert self._orchestration is not None
        stage_id, replica_id = replica.stage_id, replica.replica_id
        client = self._pools[stage_id].clients[replica_id]
        timeout_s = self._policies[stage_id].stall_timeout_s
        if client is None or not timeout_s:
            return
        now_s = self._clock()
        watched, stall = self._watched.get(replica, (None, None))
        if watched is not client or stall is None:
            stall = StallWatch(replica.name, timeout_s, now_s)
            self._watched[replica] = (client, stall)
        complaint = stall.look(client.heartbeat(), now_s)
        if complaint is not None:
            error = ReplicaDeadError(complaint)
            await self._orchestration.evict_replica(stage_id, replica_id, error)

    def _fail(self, replica: Replica, text: str) -> None:
        """Note why a replica does not serve, and when it is tried again, if ever."""
        replica.last_error = text
        delay_s = replica.budget.next_delay_s()
        if delay_s is not None:
            logger.warning("stage=%s is started again in %g s", replica.name, delay_s)
            replica.become(ReplicaState.BACKOFF, next_attempt_s=self._clock() + delay_s)
            return
        logger.error("stage=%s stays down: its restart budget is spent: %s", replica.name, text)
        replica.become(ReplicaState.STOPPED)
        self._spawn(self._give_up(replica.stage_id), f"give up {replica.name}")

    async def _give_up(self, stage_id: int) -> None:
        assert self._orchestration is not None
        if not self.expects(stage_id, float("inf")):
            await self._orchestration.stage_given_up(stage_id)

    async def _bring_back(self, replica: Replica) -> None:
        """Start a replica again until it serves or its budget is spent."""
        while replica.next_attempt_s is not None:
            await self._sleep(max(0.0, replica.next_attempt_s - self._clock()))
            replica.become(ReplicaState.STARTING)
            await self._start_again(replica)

    async def _start_again(self, replica: Replica) -> None:
        assert self._orchestration is not None
        try:
            # The earlier incarnation must have given its device back.
            await self._pool(replica).wait_closed(replica.replica_id)
            client = await self._starter.start(replica)
        except Exception as error:  # the replica's boundary: it alone did not start
            logger.warning("stage=%s did not start again", replica.name, exc_info=error)
            self._fail(replica, _text_of(error))
            return
        self._orchestration.attach_replica(replica.stage_id, replica.replica_id, client)
        replica.num_restarts += 1
        self._serves(replica)
        self._metrics.replica_restarted(replica.stage, replica.replica_id)

    def _serves(self, replica: Replica) -> None:
        replica.become(ReplicaState.READY)
        took_s = replica.start_took_s or 0.0
        self._metrics.replica_started(replica.stage, replica.replica_id, took_s)

    # Operators.

    def restart(self, stage: str, replica_id: int) -> ReplicaStatus:
        """Start a replica anew: now when it is down, else once it is drained. Returns at once.

        Raises:
            UnknownReplicaError: there is no such replica.
            ReplicaStateError: it is being started or drained already.
        """
        replica = self._find(stage, replica_id)
        if replica.is_busy:
            raise ReplicaStateError(f"stage {replica.name} is {replica.state}")
        replica.budget.refill()
        self._let_go(replica)
        if replica.is_serving:
            replica.become(ReplicaState.DRAINING)
            self._take_in_hand(replica, self._drain_and_restart(replica))
        else:
            replica.become(ReplicaState.STARTING)
            self._take_in_hand(replica, self._restart_now(replica))
        return replica.status()

    def drain(self, stage: str, replica_id: int) -> ReplicaStatus:
        """Let a replica finish what it has, then keep it down until `restart`. Returns at once.

        Raises:
            UnknownReplicaError: there is no such replica.
            ReplicaStateError: it is being started or drained, or is down already.
        """
        replica = self._find(stage, replica_id)
        if replica.is_serving and not replica.is_busy:
            replica.become(ReplicaState.DRAINING)
            self._take_in_hand(replica, self._drain_and_stop(replica))
        elif replica.is_waiting:
            self._let_go(replica)
            replica.become(ReplicaState.STOPPED)
            self._spawn(self._give_up(replica.stage_id), f"give up {replica.name}")
        else:
            raise ReplicaStateError(f"stage {replica.name} is {replica.state}")
        return replica.status()

    async def _restart_now(self, replica: Replica) -> None:
        await self._start_again(replica)
        await self._bring_back(replica)

    async def _drain_and_restart(self, replica: Replica) -> None:
        await self._drain(replica, self._policies[replica.stage_id].drain_timeout_s)
        replica.become(ReplicaState.STARTING)
        await self._restart_now(replica)

    async def _drain_and_stop(self, replica: Replica) -> None:
        await self._drain(replica, None)
        await self._pool(replica).wait_closed(replica.replica_id)
        replica.become(ReplicaState.STOPPED)
        await self._give_up(replica.stage_id)

    async def _drain(self, replica: Replica, timeout_s: float | None) -> None:
        """Finish what a replica has, within the timeout, and empty its slot."""
        assert self._orchestration is not None
        pool = self._pool(replica)
        pool.mark_replica_unavailable(replica.replica_id)
        if await pool.wait_drained(replica.replica_id, timeout_s):
            pool.evict_replica(replica.replica_id, STOP_GRACE_S)
            return
        error = ReplicaDeadError(f"stage {replica.name} is restarted by an operator")
        await self._orchestration.evict_replica(replica.stage_id, replica.replica_id, error)

    def _find(self, stage: str, replica_id: int) -> Replica:
        for replica in self._replicas.values():
            if (replica.stage, replica.replica_id) == (stage, replica_id):
                return replica
        raise UnknownReplicaError(f"there is no replica {stage}/{replica_id}")

    # Tasks.

    def _take_in_hand(self, replica: Replica, work: Coroutine[object, object, None]) -> None:
        self._tasks[replica] = self._spawn(work, f"supervise {replica.name}")

    def _let_go(self, replica: Replica) -> None:
        """End the wait for a replica's next attempt."""
        task = self._tasks.pop(replica, None)
        if task is not None:
            task.cancel()

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        assert self._orchestration is not None, "the orchestrator does not run"
        return self._orchestration.spawn(work, name)

    def _pool(self, replica: Replica) -> StagePool:
        return self._pools[replica.stage_id]


def _text_of(error: Exception) -> str:
    text = dead_text(error) if isinstance(error, EngineDeadError) else str(error)
    return text or type(error).__name__
