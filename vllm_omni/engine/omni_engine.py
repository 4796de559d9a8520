"""OmniEngine: the orchestrator's thread with its loop, its queues and its pools.

Children of a process die with the *thread* that spawned them, so this one spawns every replica
and lives as long as they do. The API's side holds this object; it never touches the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import importlib
import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import janus

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import PipelineConfig
from vllm_omni.engine.bridge import PromptBridge
from vllm_omni.engine.mailbox import Inbox, Outbox
from vllm_omni.engine.metrics_protocol import EngineMetrics, NullMetrics
from vllm_omni.engine.orchestrator import MEMBERSHIP_DRAIN_TIMEOUT_S, Orchestrator, RpcQueue
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.replica_start import StartReplica
from vllm_omni.engine.replica_state import ReplicaStatus
from vllm_omni.engine.restart import RestartPolicy
from vllm_omni.engine.stage_client import ReplicaMetrics
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.supervisor import Supervisor
from vllm_omni.errors import ConfigError, EngineStoppedError

logger = logging.getLogger(__name__)

MAX_RPC_CALLS = 64
"""Calls into replicas that may wait for their results at once."""
SupervisorAction: TypeAlias = Literal["restart", "drain"]
_OUTPUT_BATCHES = 256
"""Batches on their way to the API's loop before outputs are merged in slots."""


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica as `/metrics` and `/health` show it."""

    stage: str
    replica: int
    is_live: bool
    metrics: ReplicaMetrics | None


class OmniEngine:
    """Everything below the front ends, in one object with one exit."""

    def __init__(
        self,
        config: ResolvedConfig,
        specs: Sequence[ReplicaSpec],
        start_replica: StartReplica,
        *,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.config = config
        self.stage_pools = _empty_pools(config)
        self.supervisor = Supervisor(
            specs,
            self.stage_pools,
            start_replica,
            [RestartPolicy.of(stage.deploy, config.limits) for stage in config.stages],
            metrics or NullMetrics(),
        )
        self._metrics = metrics or NullMetrics()
        self._bridges = load_bridges(config.pipeline)
        self.inbox = Inbox(4 * config.limits.max_in_flight + MAX_RPC_CALLS)
        self.outbox = Outbox(_OUTPUT_BATCHES)
        self.rpc_queue: RpcQueue = janus.Queue(2 * MAX_RPC_CALLS)
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="omni-orchestrator", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orchestrator: Orchestrator | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._ids = itertools.count()

    def __repr__(self) -> str:
        state = "live" if self.is_alive() else "dead"
        return f"<OmniEngine {state} {self.stage_pools}>"

    def start(self) -> concurrent.futures.Future[None]:
        """Start the thread; the result comes when every replica is ready, or the first error."""
        self._thread.start()
        return self._ready

    def is_alive(self) -> bool:
        """The orchestrator's thread runs."""
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """`shutdown` was called: what runs may end, nothing new begins."""
        return self._stopping

    def internal_id(self, request_id: str) -> str:
        """An id no other request of this process has, whatever the client chose."""
        return f"{request_id}-{next(self._ids):x}"

    def replica_figures(self) -> list[ReplicaFigures]:
        """What every slot says of itself."""
        return [
            ReplicaFigures(
                pool.name, replica_id, client is not None, client.metrics() if client else None
            )
            for pool in self.stage_pools
            for replica_id, client in enumerate(list(pool.clients))
        ]

    def supervise(
        self, action: SupervisorAction, stage: str, replica_id: int
    ) -> concurrent.futures.Future[ReplicaStatus]:
        """Have the supervisor drain or restart a replica; what it made of it. From any thread.

        Raises:
            EngineStoppedError: the orchestrator has ended.
        """

        async def act() -> ReplicaStatus:
            if action == "restart":
                return self.supervisor.restart(stage, replica_id)
            return self.supervisor.drain(stage, replica_id)

        with self._lock:
            if self._loop is None or self._orchestrator is None or self._stopping:
                raise EngineStoppedError("the engine has stopped")
            return asyncio.run_coroutine_threadsafe(act(), self._loop)

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Stop the orchestrator and every replica, and wait for it. Repeatable, from any thread.

        Running requests get `drain_s` to end.
        """
        with self._lock:
            self._stopping = True
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._begin_shutdown, drain_s)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(drain_s + 2 * MEMBERSHIP_DRAIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the orchestrator did not stop in time")

    def _end_with_interpreter(self) -> None:
        """For a program that ends without `shutdown`; nothing in a fork, which has no thread."""
        if self.is_alive():
            self.shutdown()

    def _begin_shutdown(self, drain_s: float) -> None:
        if self._orchestrator is not None:
            self._orchestrator.request_shutdown(drain_s)
        elif self._main is not None:
            self._main.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                with self._lock:
                    self._loop = runner.get_loop()
                runner.run(self._serve())
        except asyncio.CancelledError:
            self._fail_start(EngineStoppedError("the engine was stopped while it started"))
        except BaseException as error:
            if not self._fail_start(error):
                logger.critical("the orchestrator's thread ends", exc_info=error)
        finally:
            atexit.unregister(self._end_with_interpreter)
            with self._lock:
                self._loop = None
            self.inbox.close()
            self.outbox.close()
            self.rpc_queue.shutdown()

    def _fail_start(self, error: BaseException) -> bool:
        """Tell whoever waits for the start; False when it was over."""
        if self._ready.done():
            return False
        self._ready.set_exception(error)
        return True

    async def _serve(self) -> None:
        self._main = asyncio.current_task()
        if self._stopping:
            raise asyncio.CancelledError
        try:
            await self.supervisor.start_all()
        except BaseException:
            for pool in self.stage_pools:
                await pool.close(MEMBERSHIP_DRAIN_TIMEOUT_S)
            raise
        self._orchestrator = Orchestrator(
            self.stage_pools,
            self.inbox,
            self.outbox,
            self.rpc_queue,
            bridges=self._bridges,
            metrics=self._metrics,
        )
        self._orchestrator.supervised_by(self.supervisor)
        self.supervisor.begin(self._orchestrator)
        # Runs before the finalizers of vLLM's clients, which were made by now: what those close
        # would look like the death of replicas.
        atexit.register(self._end_with_interpreter)
        self._ready.set_result(None)
        await self._orchestrator.run()


def load_bridges(pipeline: PipelineConfig) -> dict[str, PromptBridge]:
    """Import the prompt bridges of a pipeline's edges, by their `module:name`."""
    bridges: dict[str, PromptBridge] = {}
    for edge in pipeline.edges:
        if edge.streams or edge.bridge in bridges:
            continue
        module, _, name = edge.bridge.partition(":")
        try:
            bridges[edge.bridge] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"pipeline {pipeline.model_type!r}: cannot load the bridge {edge.bridge!r} from "
                f"stage {edge.source!r} to {edge.target!r}: {error}"
            ) from error
    return bridges


def _empty_pools(config: ResolvedConfig) -> list[StagePool]:
    return [
        StagePool(
            stage.stage_id,
            stage.config.name,
            stage.config.kind,
            [None] * stage.deploy.num_replicas,
        )
        for stage in config.stages
    ]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
