"""The orchestrator: takes every request through its stages, on its own thread's event loop.

One task reads the API's messages, one task per live replica awaits its outputs, one timer serves
all deadlines. Nothing polls. Decisions are made in `decisions.py`; this file performs them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeAlias, assert_never

import janus
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine import decisions
from vllm_omni.engine.bridge import PromptBridge
from vllm_omni.engine.decisions import Action, CompanionDone, Emit, Fail, Finish, Forward
from vllm_omni.engine.fault_isolation import ENGINE_DIED, dead_text
from vllm_omni.engine.mailbox import Inbox, Outbox
from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.metrics_protocol import EngineMetrics, NullMetrics
from vllm_omni.engine.queue_messages import (
    AddCompanion,
    AddRequest,
    ClientOutput,
    ErrorMessage,
    RpcCall,
    RpcResult,
    UpdateRequest,
)
from vllm_omni.engine.replica_calls import call_replicas
from vllm_omni.engine.request_state import OrchestratorRequestState
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.submission import Submission
from vllm_omni.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineStoppedError,
    OmniError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)

MEMBERSHIP_DRAIN_TIMEOUT_S = 10.0
"""How long the replicas get to stop when the orchestrator ends."""

RpcQueue: TypeAlias = janus.Queue[RpcResult | ErrorMessage]


class Orchestrator(Submission):
    """Owns requests and pools between `run`'s beginning and end."""

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        inbox: Inbox,
        outbox: Outbox,
        rpc_queue: RpcQueue,
        *,
        bridges: Mapping[str, PromptBridge] | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            stage_pools,
            outbox,
            bridges=bridges or {},
            metrics=metrics or NullMetrics(),
            clock=clock,
        )
        self._inbox = inbox
        self._rpc_queue = rpc_queue
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._watchers: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._shutdown_requested = asyncio.Event()
        self._shutdown_event = asyncio.Event()
        self._drain_s = 0.0

    def __repr__(self) -> str:
        return f"<Orchestrator {self.stage_pools} requests={self.num_running}>"

    async def run(self) -> None:
        """Serve until `request_shutdown`, then stop every replica.

        An `EngineDeadError` that escapes the guards is a teardown: whoever waits is told, and
        it is not raised again. Any other error is a bug: it is told and raised.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.spawn(self._serve_messages(), "messages")
                self.spawn(self._supervision.watch(), "stalls")
                for pool in self.stage_pools:
                    for replica_id in pool.live_replica_ids():
                        self._watch(pool.stage_id, replica_id)
                await self._shutdown_requested.wait()
                await self._drain()
                self._shutdown_event.set()
                for task in list(self._running):
                    task.cancel()
        except BaseExceptionGroup as group:
            _, bugs = group.split(EngineDeadError)
            first = _first_leaf(group)
            self._announce_death(
                (dead_text(first) if isinstance(first, EngineDeadError) else str(first))
                or ENGINE_DIED
            )
            if bugs is not None:
                raise bugs from None
        finally:
            await self._close()

    def request_shutdown(self, drain_s: float = 0.0) -> None:
        """Stop: running requests get `drain_s` to end, then they are failed."""
        if self._shutdown_requested.is_set():
            self._idle.set()  # asked again: do not wait any longer
        self._drain_s = drain_s
        self._shutdown_requested.set()

    async def _drain(self) -> None:
        if self._drain_s > 0 and self.request_states:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), self._drain_s)
            except TimeoutError:
                logger.warning("%d requests did not end in time", self.num_running)
        for req_id, state in list(self.request_states.items()):
            if state.parent_id is None:
                await self._fail_request(
                    _failure(EngineStoppedError("the engine is stopping"), req_id)
                )

    async def _close(self) -> None:
        self._deadlines.close()
        self._flush_outputs()
        await asyncio.gather(*(pool.close(MEMBERSHIP_DRAIN_TIMEOUT_S) for pool in self.stage_pools))
        self.request_states.clear()

    def _announce_death(self, text: str) -> None:
        """Wake everybody who waits: callers of methods, and every request's client."""
        logger.error("the orchestrator died: %s", text)
        message = ErrorMessage(text, True, code=EngineStoppedError.code)
        self._queue_error(message)
        try:
            self._rpc_queue.sync_q.put_nowait(message)
        except (janus.SyncQueueFull, janus.SyncQueueShutDown):
            logger.warning("the RPC queue is full; its callers end when it closes")

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run work as long as the orchestrator runs."""
        assert self._tasks is not None, "the orchestrator is not running"
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def attach_replica(self, stage_id: int, replica_id: int, client: StageClient) -> None:
        """Put a replica that is ready into its empty slot and listen to it."""
        self.stage_pools[stage_id].attach_replica(replica_id, client)
        self._watch(stage_id, replica_id)
        self.spawn(self._place_parked(), "parked requests")

    async def evict_replica(self, stage_id: int, replica_id: int, error: EngineDeadError) -> None:
        """Take a replica out as if it had died: its requests fail with this error."""
        await self._handle_dead_replica(stage_id, replica_id, error)

    async def stage_given_up(self, stage_id: int) -> None:
        """Nothing brings a replica of this stage back: who waits for one is failed."""
        await self._place_parked()

    def _watch(self, stage_id: int, replica_id: int) -> None:
        pool = self.stage_pools[stage_id]
        self._watchers[stage_id, replica_id] = self.spawn(
            self._watch_replica(stage_id, replica_id, pool.client(replica_id)),
            f"outputs {pool.name}/{replica_id}",
        )

    async def _watch_replica(self, stage_id: int, replica_id: int, client: StageClient) -> None:
        """Await a replica's outputs as long as it holds its slot."""
        pool = self.stage_pools[stage_id]
        while pool.clients[replica_id] is client:
            outputs = await self._next_outputs(stage_id, replica_id, client)
            if outputs is None:
                return
            await self._handle_processed_outputs(stage_id, replica_id, outputs)
            self._flush_outputs()
            # A replica that always has outputs must not keep the others from being heard.
            await asyncio.sleep(0)

    async def _next_outputs(
        self, stage_id: int, replica_id: int, client: StageClient
    ) -> Sequence[StageOutput] | None:
        """The guard around one replica, whatever its kind; None when there is no more to await."""
        try:
            return await client.get_outputs_async()
        except EngineDeadError as error:
            if self.stage_pools[stage_id].clients[replica_id] is client:
                await self._handle_dead_replica(stage_id, replica_id, error)
            return None
        except Exception:
            if self._shutdown_event.is_set():
                return None
            logger.exception(
                "stage=%d replica=%d: reading its outputs failed", stage_id, replica_id
            )
            raise

    async def _handle_processed_outputs(
        self, stage_id: int, replica_id: int, outputs: Sequence[StageOutput]
    ) -> None:
        """Perform what the outputs of one engine step lead to."""
        now_s = self._clock()
        states = self.request_states
        for output in outputs:
            state = states.get(output.request_id)
            if state is None or stage_id in state.finished_ts:
                continue  # released meanwhile, or late
            is_first = stage_id not in state.first_output_ts
            if output.finished:
                self.stage_pools[stage_id].note_finished(output.request_id)
            actions = decisions.on_stage_output(state, stage_id, output, now_s)
            if is_first or output.finished or output.audio is not None:
                is_first = is_first and stage_id in state.first_output_ts
                self._count_output(state, stage_id, output, now_s, is_first=is_first)
            for action in actions:
                await self._perform(action, state, stage_id, replica_id, output)
            if output.finished and output.failure is None and states.get(output.request_id):
                await self._tell_source_ended(state, stage_id)

    async def _perform(
        self,
        action: Action,
        state: OrchestratorRequestState,
        stage_id: int,
        replica_id: int,
        output: StageOutput,
    ) -> None:
        match action:
            case Emit(is_last):
                self._queue_output(
                    ClientOutput(
                        state.request_id,
                        stage_id,
                        output,
                        state.delta,
                        state.timings() if is_last else None,
                    )
                )
            case Forward(source):
                await self._guarded(
                    state.request_id,
                    stage_id,
                    self._forward_to_next_stage(
                        state.request_id,
                        source,
                        output,
                        state,
                        src_replica_id=replica_id,
                        is_streaming_session=state.streaming_enabled,
                    ),
                )
            case Finish():
                await self._cleanup_request_ids(
                    self._with_companions([state.request_id]), abort=True
                )
            case Fail(code, message, field):
                await self._fail_request(
                    ErrorMessage(
                        message,
                        True,
                        state.parent_id or state.request_id,
                        stage_id,
                        code=code,
                        field=field,
                    )
                )
            case CompanionDone():
                await self._on_companion_done(state, stage_id, replica_id, output)
            case _:
                assert_never(action)

    async def _on_companion_done(
        self,
        companion: OrchestratorRequestState,
        stage_id: int,
        replica_id: int,
        output: StageOutput,
    ) -> None:
        assert companion.parent_id is not None
        parent = self.request_states.get(companion.parent_id)
        if parent is None:
            return
        parent.open_companions -= 1
        for action in decisions.forwards_after(parent, stage_id):
            await self._perform(action, parent, stage_id, replica_id, output)

    def _count_output(
        self,
        state: OrchestratorRequestState,
        stage_id: int,
        output: StageOutput,
        now_s: float,
        *,
        is_first: bool,
    ) -> None:
        """Tell the metrics of a first output, of audio, and of an end."""
        name, since_s = state.plan.stages[stage_id].name, now_s - state.arrival_s
        audio = output.audio
        if is_first:
            self._metrics.first_output(name, state.first_output_ts[stage_id] - state.arrival_s)
        if audio is not None:
            if not state.audio_s:
                self._metrics.first_audio(since_s)
            state.audio_s[stage_id] = state.audio_s.get(stage_id, 0.0) + audio.duration_s
        if output.finished:
            self._metrics.request_finished(name, "failed" if output.failure else "finished")
            if stage_id in state.audio_s:
                wall_s = now_s - state.stage_submit_ts[stage_id]
                self._metrics.audio_written(name, state.audio_s[stage_id], wall_s)

    async def _serve_messages(self) -> None:
        while True:
            try:
                messages, aborts = await self._inbox.take()
            except janus.AsyncQueueShutDown:
                return
            for message in messages:
                if isinstance(message, RpcCall):
                    self.spawn(self._serve_rpc(message), f"rpc {message.method}")
                elif message.request_id not in aborts:
                    await self._guarded(message.request_id, None, self._handle_message(message))
            if aborts:
                await self._cleanup_request_ids(self._with_companions(aborts), abort=True)

    async def _handle_message(self, message: AddRequest | AddCompanion | UpdateRequest) -> None:
        match message:
            case AddRequest():
                await self._handle_add_request(message)
            case AddCompanion():
                await self._handle_add_companion(message)
            case UpdateRequest():
                await self._handle_streaming_update(message)
            case _:
                assert_never(message)

    async def _guarded(self, request_id: str, stage_id: int | None, work: Awaitable[None]) -> None:
        """The boundary of one request: a bug met on its way fails it and nobody else."""
        try:
            await work
        except EngineDeadError:
            raise
        except BadRequestError as error:
            await self._fail_request(_failure(error, request_id, stage_id))
        except Exception as error:
            logger.exception("request=%s failed", request_id)
            failed = RequestFailedError(f"{type(error).__name__}: {error}")
            await self._fail_request(_failure(failed, request_id, stage_id))

    def _on_expired(self, request_ids: Sequence[str]) -> None:
        self.spawn(self._expire(request_ids), "deadlines")

    async def _expire(self, request_ids: Sequence[str]) -> None:
        """Fail expired requests with what they waited for, and stop them everywhere."""
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            if state is None:
                continue
            timeout_s = state.deadline_s - state.arrival_s
            stage_id, text = decisions.describe_wait(state, timeout_s)
            await self._fail_request(_failure(DeadlineExceededError(text), request_id, stage_id))

    async def _serve_rpc(self, call: RpcCall) -> None:
        result = await call_replicas(self.stage_pools, call)
        try:
            self._rpc_queue.sync_q.put_nowait(result)
        except (janus.SyncQueueFull, janus.SyncQueueShutDown):
            logger.warning("nobody takes the result of %s", call.method)


def _failure(error: OmniError, request_id: str, stage_id: int | None = None) -> ErrorMessage:
    return ErrorMessage(str(error), True, request_id, stage_id, code=error.code, field=error.field)


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
