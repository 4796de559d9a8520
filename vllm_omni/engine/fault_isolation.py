"""Fault isolation: a dead replica fails the requests that depended on it, and nothing else.

The base of the orchestrator: its tables, its way to clients, and every path on which a request
is failed or released. Runs on the orchestrator's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.cfg_companions import CfgCompanionTracker
from vllm_omni.engine.deadlines import Deadlines
from vllm_omni.engine.duplex_sessions import DuplexSessions
from vllm_omni.engine.mailbox import Outbox, OutputBatch
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.queue_messages import ClientOutput, ErrorMessage
from vllm_omni.engine.request_state import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.errors import OmniError, ReplicaDiedError, StageUnavailableError

logger = logging.getLogger(__name__)

ENGINE_DIED = "Stage engine died"
_BOILERPLATE = EngineDeadError().args[0]
"""vLLM's own first words, the same for every death."""


def dead_text(error: EngineDeadError) -> str:
    """What a dead replica said of its death."""
    said = [str(arg) for arg in error.args if arg and arg != _BOILERPLATE]
    return " ".join(said) or ENGINE_DIED


class Supervision(Protocol):
    """Who brings replicas back (`supervisor.py`)."""

    def replica_died(self, stage_id: int, replica_id: int, text: str) -> None:
        """A replica was evicted."""

    def expects(self, stage_id: int, by_s: float) -> bool:
        """Whether a replica of this stage serves, or is due before then."""

    async def watch(self) -> None:
        """Look after replicas as long as the orchestrator runs."""


class NoSupervision:
    """Replicas that die stay dead."""

    def replica_died(self, stage_id: int, replica_id: int, text: str) -> None:
        pass

    def expects(self, stage_id: int, by_s: float) -> bool:
        return False

    async def watch(self) -> None:
        pass


class FaultIsolation:
    """Requests, pools and the one way out."""

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        outbox: Outbox,
        *,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage_pools = list(stage_pools)
        self.request_states: dict[str, OrchestratorRequestState] = {}
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._supervision: Supervision = NoSupervision()
        self._cfg_tracker = CfgCompanionTracker()
        self._sessions = DuplexSessions()
        self._deadlines = Deadlines(self._on_expired, clock)
        self._pending: OutputBatch = []
        self._idle = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Requests between admission and release, companions included."""
        return len(self.request_states)

    def supervised_by(self, supervision: Supervision) -> None:
        """From now on somebody brings dead replicas back."""
        self._supervision = supervision

    def _on_expired(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    def _queue_output(self, item: ClientOutput | ErrorMessage) -> None:
        """Hand something to the API loop; what one engine step makes crosses as one batch."""
        self._pending.append(item)
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._flush_outputs)

    def _flush_outputs(self) -> None:
        if self._pending:
            batch, self._pending = self._pending, []
            self._outbox.put(batch)

    def _queue_error(self, message: ErrorMessage) -> None:
        self._pending.append(message)
        self._flush_outputs()

    async def _handle_dead_replica(
        self, stage_id: int, replica_id: int, error: EngineDeadError
    ) -> None:
        """Evict a dead replica and fail the requests that depended on it."""
        pool = self.stage_pools[stage_id]
        if pool.clients[replica_id] is None:
            return
        text = dead_text(error)
        logger.error("stage=%s replica=%d died: %s", pool.name, replica_id, text)
        pool.evict_replica(replica_id)
        self._supervision.replica_died(stage_id, replica_id, text)
        has_survivor = pool.live_num_replicas > 0
        doomed: dict[str, None] = {}
        for req_id, state in list(self.request_states.items()):
            if stage_id not in state.stage_submit_ts:
                continue
            if not has_survivor or pool.get_bound_replica_id(req_id) == replica_id:
                doomed[state.parent_id or req_id] = None
        for req_id in doomed:
            self._queue_error(
                ErrorMessage(text, True, req_id, stage_id, code=ReplicaDiedError.code)
            )
        await self._cleanup_request_ids(self._with_companions(doomed), abort=True, reason="failed")

    async def _fail_request_dead_stage(self, req_id: str, stage_id: int) -> None:
        """Fail one request because this stage cannot take it. Safe for unknown ids."""
        await self._fail_request(
            ErrorMessage(
                f"Stage-{stage_id} has no live replica",
                True,
                req_id,
                stage_id,
                code=StageUnavailableError.code,
            )
        )

    async def _fail_request(self, message: ErrorMessage) -> None:
        """Tell the client why, then release the request and stop it everywhere."""
        assert message.request_id is not None, "a request's failure names the request"
        self._queue_error(message)
        await self._cleanup_request_ids(
            self._with_companions([message.request_id]), abort=True, reason="failed"
        )

    async def _dispatch_or_fail_request(
        self,
        dispatch: Callable[[], Awaitable[object]],
        *,
        req_id: str,
        stage_id: int,
        operation: str,
        dispatch_req_id: str | None = None,
    ) -> bool:
        """Run a dispatch; fail just this request when its stage cannot take it.

        `dispatch` runs inside the guard, replica selection included, and returns the replica's id
        if it gave the request to one. Anything but a stage that is unavailable, a replica that is
        dead and an error made for the client propagates.

        Returns:
            True when it was dispatched and the request is still wanted.
        """
        was_known = req_id in self.request_states
        try:
            replica_id = await dispatch()
        except (StageUnavailableError, EngineDeadError, OmniError) as error:
            if was_known and req_id not in self.request_states:
                return False  # failed or aborted meanwhile, and said so
            logger.warning("request=%s %s failed: %s", req_id, operation, error)
            await self._fail_dispatch(error, req_id, stage_id, dispatch_req_id or req_id)
            return False
        if was_known and req_id not in self.request_states:
            if isinstance(replica_id, int):
                await self._abort_late(stage_id, replica_id, dispatch_req_id or req_id)
            return False
        return True

    async def _fail_dispatch(
        self, error: Exception, req_id: str, stage_id: int, dispatch_req_id: str
    ) -> None:
        if isinstance(error, StageUnavailableError):
            await self._fail_request_dead_stage(req_id, stage_id)
        elif isinstance(error, EngineDeadError):
            await self._fail_dead_dispatch(error, req_id, stage_id, dispatch_req_id)
        else:
            assert isinstance(error, OmniError)
            await self._fail_request(
                ErrorMessage(str(error), True, req_id, stage_id, code=error.code, field=error.field)
            )

    async def _fail_dead_dispatch(
        self, error: EngineDeadError, req_id: str, stage_id: int, dispatch_req_id: str
    ) -> None:
        """The replica died during submit: fail this request, and evict before the next lands."""
        pool = self.stage_pools[stage_id]
        replica_id = pool.get_bound_replica_id(dispatch_req_id)
        live = pool.live_replica_ids()
        if any(other != replica_id for other in live):
            cause = f"Stage-{stage_id} replica {replica_id} died"
        else:
            cause = f"Stage-{stage_id} has no live replica"
        await self._fail_request(
            ErrorMessage(
                f"{cause}: {dead_text(error)}", True, req_id, stage_id, code=ReplicaDiedError.code
            )
        )
        if replica_id is not None and replica_id in live:
            await self._handle_dead_replica(stage_id, replica_id, error)

    async def _abort_late(self, stage_id: int, replica_id: int, request_id: str) -> None:
        """The request was released while it was being submitted: only the replica still has it."""
        pool = self.stage_pools[stage_id]
        pool.release(request_id)
        client = pool.clients[replica_id]
        if client is not None:
            await client.abort_requests_async([request_id])

    def _with_companions(self, request_ids: Iterable[str]) -> list[str]:
        ids: list[str] = []
        for request_id in request_ids:
            ids.append(request_id)
            ids.extend(self._cfg_tracker.cleanup_parent(request_id))
        return ids

    async def _cleanup_request_ids(
        self, request_ids: Iterable[str], *, abort: bool, reason: str = "aborted"
    ) -> None:
        """Release requests: the only place where anything of a request is given back.

        With `abort` what still runs is stopped. May run twice; unknown ids are ignored.
        """
        released = []
        running: dict[int, list[str]] = {}
        for request_id in request_ids:
            state = self.request_states.pop(request_id, None)
            if state is None:
                continue
            released.append(request_id)
            self._deadlines.discard(request_id)
            if state.session_id is not None:
                self._sessions.close_request(request_id)
            for stage_id in state.unfinished_stages():
                running.setdefault(stage_id, []).append(request_id)
                self._metrics.request_finished(state.plan.stages[stage_id].name, reason)
        if abort:
            for stage_id, ids in running.items():
                await self.stage_pools[stage_id].abort_requests(ids)
        for request_id in released:
            for pool in self.stage_pools:
                pool.release(request_id)
        if not self.request_states:
            self._idle.set()
