"""From vLLM's engine outputs to stage outputs, for one autoregressive replica.

vLLM's `OutputProcessor` detokenises, looks for stop strings and builds logprobs; this keeps what
belongs to which stage request. No sockets in here: the client sends what it says.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from vllm_omni.core.request_deadlines import REMAINING_KEY
from vllm_omni.core.step_faults import decode_reason
from vllm_omni.core.token_streams import TARGETS_KEY
from vllm_omni.engine.ar_prompts import PreparedPrompt
from vllm_omni.engine.ar_requests import PartOutputs, RunningRequest
from vllm_omni.engine.messages import StageFailure, StageOutput, StreamTarget
from vllm_omni.errors import BadRequestError, RequestFailedError, StageUnavailableError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Processed:
    """What one message of the core leads to."""

    outputs: list[StageOutput] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    """Engine ids to abort in the core."""
    stop: list[str] = field(default_factory=list)
    """Engine ids whose text is complete and whose token streams must end with `stop`."""
    stats: IterationStats | None = None


class ArOutputs:
    """The running requests of one replica."""

    def __init__(self, stage: str, tokenizer: TokenizerLike | None) -> None:
        self._stage = stage
        self._processor = OutputProcessor(tokenizer, log_stats=True)
        self._running: dict[str, RunningRequest] = {}
        self._by_engine_id: dict[str, RunningRequest] = {}
        self._by_key: dict[str, tuple[RunningRequest, int, int]] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_entries(self) -> int:
        """Entries of every table, vLLM's included; zero when nothing runs."""
        processor = self._processor
        tables = (self._running, self._by_engine_id, self._by_key)
        theirs = (processor.request_states, processor.parent_requests, processor.external_req_ids)
        return sum(map(len, (*tables, *theirs)))

    def add(
        self,
        request_id: str,
        parts: Sequence[PreparedPrompt],
        targets: Sequence[StreamTarget],
        remaining_s: float | None = None,
    ) -> tuple[RunningRequest, list[EngineCoreRequest]]:
        """Register a request; returns it and what the core is to be sent for it."""
        extra_args: dict[str, object] = {}
        if targets:
            extra_args[TARGETS_KEY] = [[t.address, t.stream, t.conditions] for t in targets]
        if remaining_s is not None:
            extra_args[REMAINING_KEY] = remaining_s
        running = RunningRequest(request_id, [], streams=bool(targets))
        self._running[request_id] = running
        to_send = []
        for i, part in enumerate(parts):
            params = _sampling_params(part.requests[0])
            running.is_constrained |= params.structured_outputs is not None
            running.parts.append(
                PartOutputs(params.output_kind, len(part.requests), part.separator)
            )
            for j, request in enumerate(part.requests):
                key = f"{request_id}/{i}.{j}"
                self._by_key[key] = (running, i, j)
                running.keys.append(key)
                for child, parent, index in _choices(_own_copy(key, request, extra_args)):
                    self._processor.add_request(child, part.text, parent, index)
                    running.engine_ids.append(child.request_id)
                    if parent is not None:
                        running.parent_ids.add(parent.request_id)
                    self._by_engine_id[child.request_id] = running
                    to_send.append(child)
        return running, to_send

    def drop(self, request_id: str) -> list[str]:
        """Forget a request whatever its state; returns the engine ids the core may still run."""
        running = self._running.pop(request_id, None)
        if running is None:
            return []
        if running.deadline is not None:
            running.deadline.cancel()
        for key in running.keys:
            del self._by_key[key]
        for engine_id in running.engine_ids:
            del self._by_engine_id[engine_id]
        alive = [i for i in running.engine_ids if self._processor.has_request(i)]
        self._processor.abort_requests(alive, internal=True)
        for parent_id in running.parent_ids:
            self._processor.parent_requests.pop(parent_id, None)
        return alive

    def drop_all(self) -> None:
        """Forget every request, and let go of their deadlines."""
        for request_id in list(self._running):
            self.drop(request_id)

    def process(self, message: EngineCoreOutputs) -> Processed:
        """Take one message of the core."""
        result = Processed(stats=IterationStats() if message.outputs else None)
        for output in message.outputs:
            running = self._by_engine_id.get(output.request_id)
            if running is None:
                continue  # dropped while this was on its way
            try:
                self._process_one(running, output, message, result)
            except Exception:  # one request's boundary: its neighbours are served
                logger.exception("stage %s: output of %s failed", self._stage, running.request_id)
                failure = StageFailure(
                    RequestFailedError.code, f"stage {self._stage} could not read its output"
                )
                self._fail(running, failure, result)
        return result

    def _process_one(
        self,
        running: RunningRequest,
        output: EngineCoreOutput,
        message: EngineCoreOutputs,
        result: Processed,
    ) -> None:
        failure = self._failure(running, output)
        if failure is not None:
            self._fail(running, failure, result)
            return
        if running.first_token_s is None and output.new_token_ids:
            running.first_token_s = time.monotonic()
        processed = self._processor.process_outputs(
            [output], message.timestamp, result.stats, message.weight_version
        )
        (result.stop if running.streams else result.abort).extend(processed.reqs_to_abort)
        for request_output in processed.request_outputs:
            _, part, segment = self._by_key[request_output.request_id]
            result.outputs.extend(running.outputs(part, segment, request_output))
        if running.finished:
            self.drop(running.request_id)

    def _failure(self, running: RunningRequest, output: EngineCoreOutput) -> StageFailure | None:
        """Ends that are not the request's own: this side aborts without hearing of it again."""
        if output.finish_reason is FinishReason.ERROR:
            told = decode_reason(output.stop_reason)
            if told is not None:
                # Of a request that was admitted the core refuses nothing but its grammar.
                is_grammar = told[0] == BadRequestError.code
                return StageFailure(*told, "structured_outputs" if is_grammar else None)
            if running.is_constrained and not output.new_token_ids:
                # The core compiles the grammar when it has the request, and tells no more.
                message = "the grammar of the structured output cannot be compiled"
                return StageFailure(BadRequestError.code, message, "structured_outputs")
            message = f"stage {self._stage} failed this request"
            if isinstance(output.stop_reason, str):
                message = f"stage {self._stage}: {output.stop_reason}"
            return StageFailure(RequestFailedError.code, message)
        if output.finish_reason is FinishReason.ABORT:
            message = f"stage {self._stage} ended this request: it is paused or shutting down"
            return StageFailure(StageUnavailableError.code, message)
        return None

    def _fail(self, running: RunningRequest, failure: StageFailure, result: Processed) -> None:
        result.abort.extend(self.drop(running.request_id))
        result.outputs.append(StageOutput(running.request_id, True, failure=failure))


def _own_copy(
    key: str, request: EngineCoreRequest, extra_args: dict[str, object]
) -> EngineCoreRequest:
    """A copy under its own id: a request may be submitted again after its replica died."""
    request = copy.copy(request)
    request.request_id = key
    request.external_req_id = None
    InputProcessor.assign_request_id(request)
    if extra_args:
        params = copy.copy(_sampling_params(request))
        params.extra_args = {**(params.extra_args or {}), **extra_args}
        request.sampling_params = params
    return request


def _choices(
    request: EngineCoreRequest,
) -> list[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The request itself, or one child for each of its `n` choices."""
    params = _sampling_params(request)
    if params.n == 1:
        return [(request, None, 0)]
    parent = ParentRequest(request)
    children = []
    for index in range(params.n):
        child = copy.copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append((child, parent, index))
    return children


def _sampling_params(request: EngineCoreRequest) -> SamplingParams:
    params = request.sampling_params
    assert params is not None, "the preparer makes requests with sampling params only"
    return params
