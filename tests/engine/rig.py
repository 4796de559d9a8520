"""An orchestrator on the test's own event loop, over fake replicas, with its queues in reach."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import janus

from tests.fakes import FakeStageClient, chain_pipeline, next_batches, settle
from vllm_omni.config.pipeline import Modality, PipelineConfig, Task
from vllm_omni.engine.bridge import PromptBridge
from vllm_omni.engine.graph import RoutePlan, compile_plan
from vllm_omni.engine.mailbox import Inbox, Outbox
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.omni_engine import load_bridges
from vllm_omni.engine.orchestrator import Orchestrator, RpcQueue
from vllm_omni.engine.queue_messages import AddRequest, ClientOutput, ErrorMessage
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.inputs.prompt import OmniPrompt

AUDIO = frozenset({Modality.AUDIO})
TEXT = frozenset({Modality.TEXT})


class Rig:
    """Pools `clients[stage_id][replica_id]`, an orchestrator over them, and its three queues."""

    def __init__(
        self,
        clients: Sequence[Sequence[FakeStageClient | None]],
        pipeline: PipelineConfig | None = None,
        *,
        bridges: Mapping[str, PromptBridge] | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.pipeline = pipeline or chain_pipeline(len(clients))
        self.pools = [
            StagePool(i, stage.name, stage.kind, replicas)
            for i, (stage, replicas) in enumerate(zip(self.pipeline.stages, clients, strict=True))
        ]
        self.inbox = Inbox(1024)
        self.outbox = Outbox(64)
        self.rpc_queue: RpcQueue = janus.Queue(64)
        self.orchestrator = Orchestrator(
            self.pools,
            self.inbox,
            self.outbox,
            self.rpc_queue,
            bridges=bridges if bridges is not None else load_bridges(self.pipeline),
            metrics=metrics,
        )
        self.received: list[ClientOutput | ErrorMessage] = []
        self._ids = itertools.count()

    def plan(
        self,
        outputs: frozenset[Modality] | None = None,
        inputs: frozenset[Modality] = frozenset(),
        task: Task = Task.CHAT,
    ) -> RoutePlan:
        """The plan of one kind of request; for all outputs of the pipeline unless told."""
        emitted = frozenset(stage.emits for stage in self.pipeline.stages if stage.emits)
        return compile_plan(self.pipeline, task, inputs, outputs or emitted)

    def request(
        self,
        request_id: str | None = None,
        plan: RoutePlan | None = None,
        *,
        timeout_s: float = 60.0,
        session_id: str | None = None,
    ) -> AddRequest:
        now_s = time.monotonic()
        return AddRequest(
            request_id=request_id or f"r{next(self._ids)}",
            plan=plan or self.plan(),
            prompt=OmniPrompt(text="hi"),
            omni_prompt=OmniPrompt(text="hi"),
            params=(None,) * len(self.pools),
            arrival_s=now_s,
            deadline_s=now_s + timeout_s,
            session_id=session_id,
        )

    async def add(self, *request_ids: str, plan: RoutePlan | None = None) -> None:
        """Give requests to the running orchestrator and let it place them."""
        for request_id in request_ids:
            self.inbox.put(self.request(request_id, plan))
        await settle()

    async def drain(self) -> list[ClientOutput | ErrorMessage]:
        """Everything that is on its way to clients, in order; remembered in `received`."""
        await settle()
        for batch in self.outbox.take():
            self.received.extend(batch)
        return self.received

    async def errors(self) -> list[ErrorMessage]:
        return [item for item in await self.drain() if isinstance(item, ErrorMessage)]

    async def next_errors(self, timeout_s: float = 5.0) -> list[ErrorMessage]:
        """Wait until the orchestrator has something for clients; the errors in it."""
        async with asyncio.timeout(timeout_s):
            while True:
                for batch in await next_batches(self.outbox):
                    self.received.extend(batch)
                if errors := await self.errors():
                    return errors

    async def next_output(self, timeout_s: float) -> ClientOutput:
        """Wait for the first output that reaches a client."""
        async with asyncio.timeout(timeout_s):
            while True:
                if outputs := await self.outputs():
                    return outputs[0]
                for batch in await next_batches(self.outbox):
                    self.received.extend(batch)

    async def outputs(self) -> list[ClientOutput]:
        return [item for item in await self.drain() if isinstance(item, ClientOutput)]

    @property
    def known(self) -> set[str]:
        return set(self.orchestrator.request_states)


@asynccontextmanager
async def running(rig: Rig, timeout_s: float = 20.0) -> AsyncIterator[Rig]:
    """The rig with its orchestrator running; it must end without an error."""
    async with asyncio.timeout(timeout_s):
        task = asyncio.create_task(rig.orchestrator.run())
        try:
            await settle()
            yield rig
        finally:
            rig.orchestrator.request_shutdown()
            await task


def is_alive(rig: Rig) -> bool:
    """The orchestrator still listens to messages."""
    return any(task.get_name() == "messages" for task in asyncio.all_tasks())
