"""vLLM's engine core as one stage's replica: pushes tokens to the next stages after each step.

`run_stage_core` is the target of the replica's process. Control messages beyond vLLM's own are
methods of `StageCore`, called through `call_utility_async` between two steps.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

import setproctitle
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.grammars import StageGrammars
from vllm_omni.core.quarantine import Quarantine
from vllm_omni.core.request_deadlines import RequestDeadlines
from vllm_omni.core.step_faults import StepError, StepFault, rewind
from vllm_omni.core.token_streams import TokenStreams
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.generation.memory_errors import free_memory
from vllm_omni.platforms import current_platform
from vllm_omni.vllm_compat import engine_core_class, grammar_manager
from vllm_omni.worker.executor import StageExecutor

logger = logging.getLogger(__name__)

StepOutputs = dict[int, EngineCoreOutputs]

COMMAND_TIMEOUT_S: Final = 300.0
"""How long a call into the core may take; long enough to load an adapter or move weights."""


class Shell(Protocol):
    """What the core needs of the process it runs in (`engine/process_child.py`)."""

    figures: Callable[[], Mapping[str, float]]

    def ready(self, info: Mapping[str, object] | None = None) -> None: ...

    def progress(self, what: str) -> None: ...

    def failed(self, error: BaseException) -> None: ...


def run_stage_core(shell: Shell, /, **kwargs: Any) -> None:
    """Target of an autoregressive replica's process; returns when the core was shut down.

    `kwargs` are those of `StageCore`: `name`, `data_bind`, `vllm_config`, `executor_class` and
    `handshake_address`; and `is_conditioned`: streams of another stage feed its requests.
    """
    current_platform().prepare_process()
    shell.progress("loading the model")
    core_class = StageCore
    if kwargs.pop("is_conditioned"):
        from vllm_omni.core.conditioned_core import ConditionedCore

        core_class = ConditionedCore
    engine_core_class.install(core_class)
    grammar_manager.install(StageGrammars)
    core_class.run_engine_core(shell=shell, local_client=True, log_stats=True, **kwargs)


class StageCore(EngineCoreProc):
    """One replica's engine core. Streams tokens to the targets named in a request's params.

    `data_bind` is where its data plane binds; None for a stage that has no streams.
    """

    def __init__(
        self, *args: Any, shell: Shell, name: str, data_bind: str | None, **kwargs: Any
    ) -> None:
        setproctitle.setproctitle(f"vllm-omni: {name}")  # vLLM has just set its own
        self._shell = shell
        self._stage = name.partition("/")[0]
        self._num_turns = 0
        self._command_began_s: float | None = None
        self._data_plane = ExitStack()
        self._connector: Connector | None = None
        self._streams: TokenStreams | None = None
        self._deadlines = RequestDeadlines(time.monotonic)
        self._thread_error: Exception | None = None
        if data_bind is not None:
            self._connector = open_connector(name, data_bind)
            self._data_plane.callback(self._connector.close)
            self._streams = TokenStreams(self._connector.sender)
        super().__init__(*args, **kwargs)
        self._quarantine = Quarantine(self.scheduler)

    def run_busy_loop(self) -> None:
        self._shell.figures = self.figures
        self._shell.ready(
            {
                "max_model_len": self.vllm_config.model_config.max_model_len,
                "data_address": self._connector.address if self._connector is not None else None,
            }
        )
        super().run_busy_loop()

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        request_id = request.request_id
        is_new = request_id not in self.scheduler.requests
        try:
            if self._streams is not None:
                params = request.sampling_params
                self._streams.open(request_id, params, request.prompt_token_ids)
            self.admit(request, request_wave)
        except Exception:  # the boundary of one request: outside it is the end of the core
            logger.exception("request %s could not be added", request_id)
            if is_new:
                super().abort_requests([request_id])
            self._send_finish_outputs_to_client(
                [request_id], request.client_index, FinishReason.ERROR
            )
            return
        self._deadlines.add(request_id, request.sampling_params)

    def admit(self, request: Request, request_wave: int = 0) -> None:
        """Give a request whose streams are open to the scheduler."""
        super().add_request(request, request_wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        super().abort_requests(request_ids)
        if self._streams is not None:
            self._streams.end(request_ids, "abort")

    def stop_requests(self, request_ids: list[str]) -> None:
        """Stop requests whose text is complete: a stop string, which only the client can see."""
        if self._streams is not None:
            self._streams.end(request_ids, "stop")
        self.abort_requests(request_ids)

    def figures(self) -> Mapping[str, float]:
        """For the heartbeat, called in its thread: requests, and whether the loop turns."""
        return {
            "num_requests": self.num_requests(),
            "progress": self._num_turns,
            "num_runnable": self._num_runnable(),
        }

    def _num_runnable(self) -> int:
        """Requests that the loop could go on with now.

        No request while a command is carried out: it has a time-out of its own, and counts itself
        when it has taken longer than that.
        """
        began_s = self._command_began_s
        if began_s is not None:
            return int(time.monotonic() - began_s > COMMAND_TIMEOUT_S)
        return 0 if self.is_scheduler_paused() else self.num_requests()

    def num_requests(self) -> int:
        """Requests this core holds, running or waiting."""
        return sum(self.scheduler.get_request_counts()) + len(self._quarantine)

    def step(self) -> tuple[StepOutputs, bool]:
        outputs, executed = self._contained(super().step)
        return outputs or {}, executed

    def step_with_batch_queue(self) -> tuple[StepOutputs | None, bool]:
        return self._contained(super().step_with_batch_queue)

    def _contained(
        self, step: Callable[[], tuple[StepOutputs | None, bool]]
    ) -> tuple[StepOutputs | None, bool]:
        """Run a step; one that raises costs the request that makes it raise, and no other."""
        self._quarantine.arrange()
        fault: StepFault | None = None
        outputs: StepOutputs | None = None
        executed = False
        try:
            outputs, executed = step()
        except StepError as error:
            fault = error.fault
        if fault is not None:
            self._recover(fault)  # outside the handler: the error holds on to the step's tensors
        self._num_turns += 1
        self._push(outputs)
        self._drop_late()
        self._quarantine.arrange()
        return outputs, executed

    @contextmanager
    def log_error_detail(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Around all that the worker does in a step, and nothing else."""
        is_contained = (
            isinstance(self.model_executor, StageExecutor)
            and self.scheduler.get_kv_connector() is None
            and self.scheduler.get_ec_connector() is None
            and scheduler_output.num_scheduled_tokens
        )
        if not is_contained:
            with super().log_error_detail(scheduler_output):
                yield
            return
        try:
            yield
        except Exception as error:  # the boundary of a step: it becomes a request's failure
            num_requests = len(scheduler_output.num_scheduled_tokens)
            logger.exception("a step of %d requests raised", num_requests)
            raise StepError(StepFault.of(error, scheduler_output, self._stage)) from None

    def _recover(self, fault: StepFault) -> None:
        """Go on after a step that raised; raises when the device or the model does not."""
        assert isinstance(self.model_executor, StageExecutor)
        if self.batch_queue is not None:
            self.batch_queue.clear()  # planned upon a step that never was
        if fault.is_memory:
            free_memory()
        try:
            self.model_executor.forget_step()
        except Exception as error:
            raise RuntimeError(
                f"{fault.reason}; nor does a step without it run: {error}"
            ) from error
        rewind(self.scheduler, fault.forgotten)
        self.model_executor.reset_encoder_cache()
        self._process_aborts_queue()
        culprit = self._quarantine.accuse(fault.scheduled)
        if culprit is not None:
            self._fail_one(culprit, fault.reason)

    def _fail_one(self, request_id: str, reason: str) -> None:
        client_index = self.scheduler.requests[request_id].client_index
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ERROR)
        if self._streams is not None:
            self._streams.fail([request_id], reason)
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        self.output_queue.put_nowait(
            (client_index, EngineCoreOutputs(outputs=[output], finished_requests={request_id}))
        )

    def _send_engine_dead(self) -> None:
        error = sys.exception()
        if error is not None:
            self._shell.failed(error)  # before the word that its clients are waiting for
        super()._send_engine_dead()

    def _push(self, outputs: StepOutputs | None) -> None:
        if self._streams is not None and outputs:
            for client_outputs in outputs.values():
                self._streams.push(client_outputs.outputs)

    def _drop_late(self) -> None:
        """End what should have ended by its client: requests in the scheduler make steps happen."""
        alive = self.alive_requests()
        late = self._deadlines.expired(alive, len(alive))
        if late:
            logger.warning("%d requests are over their deadline and nobody aborted them", len(late))
            self.end_late(late)

    def alive_requests(self) -> Collection[str]:
        """Ids of the requests that are here."""
        requests: Collection[str] = self.scheduler.requests
        return requests

    def end_late(self, request_ids: list[str]) -> None:
        """End requests whose deadline has passed."""
        if self._streams is not None:
            self._streams.fail(request_ids, "the deadline passed while this stage was writing")
        self._send_abort_outputs(
            self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        )

    def process_input_sockets(self, *args: Any, **kwargs: Any) -> None:
        self._or_die("input", lambda: super(StageCore, self).process_input_sockets(*args, **kwargs))

    def process_output_sockets(self, *args: Any, **kwargs: Any) -> None:
        self._or_die(
            "output", lambda: super(StageCore, self).process_output_sockets(*args, **kwargs)
        )

    def _or_die(self, what: str, work: Callable[[], None]) -> None:
        """Run a socket thread: without it the core would live on, deaf or mute, and all wait."""
        try:
            work()
        except Exception as error:  # a thread's boundary: it becomes the death of the core
            logger.exception("the %s thread of the core failed", what)
            self._thread_error = error
            self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if self._thread_error is not None:
            raise self._thread_error
        self._command_began_s = time.monotonic()
        super()._handle_client_request(request_type, request)
        self._command_began_s = None
        self._num_turns += 1

    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None:
        # Runs in the input thread, before `add_request` could open the streams.
        if self._streams is not None:
            self._streams.refuse(request.sampling_params, "the engine could not read this request")
        super()._handle_request_preproc_error(request)

    def _reject_add_in_shutdown(self, request: Request) -> bool:
        rejected = super()._reject_add_in_shutdown(request)
        if rejected and self._streams is not None:
            self._streams.refuse(request.sampling_params, "the replica shuts down")
        return bool(rejected)

    def _send_finish_outputs_to_client(
        self, req_ids: list[str], client_index: int, finish_reason: FinishReason
    ) -> None:
        # The outputs of requests that end outside a step: paused, shut down, refused.
        if self._streams is not None:
            self._streams.finish(req_ids, finish_reason)
        super()._send_finish_outputs_to_client(req_ids, client_index, finish_reason)

    def shutdown(self) -> None:
        if self._streams is not None:
            self._streams.close("the replica stopped")
        self._data_plane.close()
        super().shutdown()
