"""Stage client of an autoregressive replica: vLLM's engine core behind our protocol.

Lives in the orchestrator's loop. Outputs, the death of the process and passed deadlines all
arrive on one queue, so that whoever waits in `get_outputs_async` hears of each at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni.config.pipeline import StageKind
from vllm_omni.core.stage_core import COMMAND_TIMEOUT_S
from vllm_omni.engine.ar_checks import refuse_fatal
from vllm_omni.engine.ar_outputs import ArOutputs, Processed
from vllm_omni.engine.ar_prompts import PreparedPrompt, PromptProcessor
from vllm_omni.engine.core_client import CoreClient
from vllm_omni.engine.messages import StageFailure, StageOutput, StageRequest
from vllm_omni.engine.process_shell import ReplicaProcess
from vllm_omni.engine.process_status import Heartbeat, ProcessExit
from vllm_omni.engine.replica_death import ReplicaDeadError
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import BadRequestError, DeadlineExceededError, RequestFailedError
from vllm_omni.inputs.prompt import OmniPrompt

logger = logging.getLogger(__name__)

Recorder = Callable[[SchedulerStats | None, IterationStats | None], None]


@dataclass(slots=True)
class ArMetrics:
    """Latest figures of the replica's scheduler."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


class ArClient:
    """One live autoregressive replica; see `stage_client.StageClient`."""

    kind = StageKind.AUTOREGRESSIVE
    data_address: str | None = None

    def __init__(
        self,
        spec: ReplicaSpec,
        process: ReplicaProcess,
        core: CoreClient,
        prompts: PromptProcessor,
    ) -> None:
        self.stage_id = spec.stage_id
        self.replica_id = spec.replica_id
        self.name = spec.name
        self.data_address = process.info.get("data_address") if spec.has_sources else None
        self._has_targets = spec.has_targets
        self.resources = AsyncExitStack()
        """What `shutdown_async` gives back."""
        self.record: Recorder | None = None
        """Hears of what every message of the core brought."""
        self._process = process
        self._core = core
        self._prompts = prompts
        self._outputs = ArOutputs(spec.name, prompts.renderer.tokenizer)
        self._arriving: set[str] = set()
        self._expired: list[str] = []
        self._metrics = ArMetrics()
        self._dead: ReplicaDeadError | None = None
        process.died.add_done_callback(self._on_exit)

    def __repr__(self) -> str:
        state = "live" if self._dead is None else "dead"
        return f"<ArClient {self.name} {state} requests={len(self._outputs)}>"

    @property
    def pid(self) -> int:
        """The replica's process, for whoever watches or measures it."""
        return self._process.pid

    async def add_request_async(self, request: StageRequest) -> None:
        """Start a request; see the protocol.

        `request.prompt`: what the preparer returned, an OmniPrompt, or a list of either.
        """
        self.check_health()
        request_id = request.request_id
        if request_id in self._outputs or request_id in self._arriving:
            raise BadRequestError(f"request id {request_id!r} is in use", field="request_id")
        self._arriving.add(request_id)
        try:
            parts = await self._prepare(request)
            if request_id not in self._arriving:
                return  # aborted while its prompt was processed
        finally:
            self._arriving.discard(request_id)
        self._refuse(request, parts)
        remaining_s = None
        if request.deadline_s is not None:
            remaining_s = request.deadline_s - time.monotonic()
        running, to_send = self._outputs.add(request_id, parts, request.targets, remaining_s)
        if remaining_s is not None:
            running.deadline = asyncio.get_running_loop().call_later(
                remaining_s, self._on_deadline, request_id
            )
        try:
            for engine_request in to_send:
                await self._core.add_request_async(engine_request)
        except BaseException:
            await self.abort_requests_async([request_id])
            raise

    async def _prepare(self, request: StageRequest) -> list[PreparedPrompt]:
        if request.prompt is None and request.sources:
            return [self._prompts.parked(request.request_id, request.params, request.sources)]
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        parts: list[PreparedPrompt] = []
        for prompt in prompts:
            if isinstance(prompt, PreparedPrompt):
                parts.append(prompt)
            elif isinstance(prompt, OmniPrompt):
                assert isinstance(request.params, SamplingParams), "a text stage's params"
                parts += await self._prompts.process(
                    request.request_id, prompt, request.params, request.options
                )
            else:
                raise BadRequestError(
                    f"stage {self.name} cannot read a prompt of type {type(prompt).__name__}",
                    field="prompt",
                )
        return parts

    def _refuse(self, request: StageRequest, parts: Sequence[PreparedPrompt]) -> None:
        """Refuse what this replica cannot run: prepared elsewhere, for another's limits."""
        if not parts:
            raise BadRequestError("a request needs at least one prompt", field="prompt")
        for part in parts:
            for engine_request in part.requests:
                refuse_fatal(engine_request, self._prompts.vllm_config)
        assert self._has_targets or not request.targets, f"{self.name} opened no data plane"
        first = parts[0].requests[0].sampling_params
        several = len(parts) > 1 or len(parts[0].requests) > 1
        if request.targets and (several or (first is not None and first.n > 1)):
            raise BadRequestError(
                "a request that is spoken or streamed onward has one prompt and n=1", field="n"
            )

    async def update_request_async(self, request: StageRequest) -> None:
        raise RequestFailedError(f"stage {self.name} takes no input while it runs")

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        engine_ids: list[str] = []
        for request_id in request_ids:
            self._arriving.discard(request_id)
            engine_ids += self._outputs.drop(request_id)
        await self._abort_engine_ids(engine_ids)

    async def _abort_engine_ids(self, engine_ids: list[str]) -> None:
        try:
            await self._core.abort_requests_async(engine_ids)
        except EngineDeadError:
            logger.debug("%s: dead before its requests were aborted", self.name)

    async def source_ended_async(self, request_id: str, stream: str) -> None:
        """Nothing: this kind of replica reads no streams."""

    async def get_outputs_async(self) -> Sequence[StageOutput]:
        while True:
            if self._dead is not None:
                raise self._dead
            try:
                message = await self._core.get_output_async()
            except EngineDeadError as error:
                raise self._died(self._process.own_error() or "its engine failed") from error
            except Exception as error:  # an output that cannot be decoded: nothing more can
                logger.exception("stage %s: cannot read outputs", self.name)
                raise self._died(f"its outputs cannot be read: {error}") from error
            processed = self._outputs.process(message)
            self._expire(processed)
            await self._tell_core(processed)
            self._note(message.scheduler_stats, processed.stats)
            if processed.outputs:
                return processed.outputs

    def _expire(self, processed: Processed) -> None:
        expired, self._expired = self._expired, []
        for request_id in expired:
            if request_id in self._outputs:
                processed.abort += self._outputs.drop(request_id)
                text = f"the deadline passed while stage {self.name} was writing"
                failure = StageFailure(DeadlineExceededError.code, text)
                processed.outputs.append(StageOutput(request_id, True, failure=failure))

    async def _tell_core(self, processed: Processed) -> None:
        try:
            if processed.abort:
                await self._core.abort_requests_async(processed.abort)
            if processed.stop:
                await self._core.stop_requests_async(processed.stop)
        except EngineDeadError:
            logger.debug("%s: dead before its requests were ended", self.name)

    def _note(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        if scheduler is not None:
            self._metrics = ArMetrics(
                scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage
            )
        if self.record is not None:
            self.record(scheduler, iteration)

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead

    async def call_utility_async(self, method: str, *args: object) -> object:
        self.check_health()
        try:
            return await asyncio.wait_for(
                self._core.call_utility_async(method, *args), COMMAND_TIMEOUT_S
            )
        except TimeoutError:
            raise DeadlineExceededError(
                f"stage {self.name}: {method} took more than {COMMAND_TIMEOUT_S:.0f} s"
            ) from None

    def metrics(self) -> ArMetrics:
        return self._metrics

    def heartbeat(self) -> Heartbeat | None:
        return self._process.heartbeat()

    async def shutdown_async(self, timeout_s: float) -> None:
        await self._process.stop(timeout_s)
        self._died("it was shut down")
        self._outputs.drop_all()  # a deadline that is due later would keep all of this until then
        await self.resources.aclose()

    def _on_exit(self, died: asyncio.Future[ProcessExit]) -> None:
        self._died(str(died.result()))

    def _on_deadline(self, request_id: str) -> None:
        self._expired.append(request_id)
        self._core.wake()

    def _died(self, how: str) -> ReplicaDeadError:
        """Note the death once; the first account of it stays."""
        if self._dead is None:
            self._dead = ReplicaDeadError(f"stage {self.name} died: {how}")
            self._core.mark_dead(self._dead)
            self._metrics = ArMetrics()
        return self._dead
