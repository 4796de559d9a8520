"""The engine core of a stage that another autoregressive stage conditions: a talker's.

A request is here before anything is known of it, parked; the stream of the upstream stage makes
its prompt, then gives each later position its condition. See `conditioning.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.request import Request

from vllm_omni.core.conditioned_requests import ConditionedRequests, sources_of
from vllm_omni.core.conditioning import ConditionedPrompt
from vllm_omni.core.stage_core import StageCore, StepOutputs
from vllm_omni.core.stage_scheduler import StageScheduler
from vllm_omni.errors import RequestFailedError

logger = logging.getLogger(__name__)


class ConditionedCore(StageCore):
    """A `StageCore` whose requests may name a source."""

    scheduler: StageScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._connector is not None, "a conditioned stage has a data plane"
        assert isinstance(self.scheduler, StageScheduler), "its config names our scheduler"
        self._fed = ConditionedRequests(
            self._connector.receiver, self.vllm_config.model_config.hf_config, self._wake
        )

    def _wake(self) -> None:
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def admit(self, request: Request, request_wave: int = 0) -> None:
        if not sources_of(request.sampling_params):
            super().admit(request, request_wave)
            return
        try:
            self._fed.park(request)
        except ValueError as error:  # a bridge that cannot serve this request says so
            self._fail(request.request_id, request.client_index, str(error))

    def abort_requests(self, request_ids: list[str]) -> None:
        self._fed.drop(request_ids)
        super().abort_requests(request_ids)

    def alive_requests(self) -> Collection[str]:
        return {*super().alive_requests(), *self._fed.ids()}

    def end_late(self, request_ids: list[str]) -> None:
        for request in self._fed.drop(request_ids):
            message = "the deadline passed before its first input was there"
            self._fail(request.request_id, request.client_index, message)
        super().end_late(request_ids)

    def _num_runnable(self) -> int:
        num_runnable = super()._num_runnable()
        if self._command_began_s is not None:
            return num_runnable
        return max(0, num_runnable - self._fed.num_parked - self.scheduler.num_starved)

    def num_requests(self) -> int:
        return super().num_requests() + self._fed.num_parked

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        super()._handle_client_request(request_type, request)
        if request_type is EngineCoreRequestType.WAKEUP:
            self._take_arrivals()

    def _push(self, outputs: StepOutputs | None) -> None:
        super()._push(outputs)
        if outputs:
            self._fed.drop(
                output.request_id
                for client_outputs in outputs.values()
                for output in client_outputs.outputs
                if output.finish_reason is not None
            )

    def _send_finish_outputs_to_client(
        self, req_ids: list[str], client_index: int, finish_reason: FinishReason
    ) -> None:
        self._fed.drop(req_ids)
        super()._send_finish_outputs_to_client(req_ids, client_index, finish_reason)

    def _take_arrivals(self) -> None:
        arrivals = self._fed.take()
        prompts = {rid: u.prompt for rid, u in arrivals.updates if u.prompt is not None}
        self.scheduler.condition(arrivals.updates)
        for request in arrivals.begun:
            self._begin(request, prompts[request.request_id])
        for request in arrivals.empty:
            self._send_finish_outputs_to_client(
                [request.request_id], request.client_index, FinishReason.STOP
            )
        for request_id, message in arrivals.failed:
            request = self._fed.request(request_id)
            if request is not None:
                self._fail(request_id, request.client_index, message)
                super().abort_requests([request_id])

    def _begin(self, request: Request, prompt: ConditionedPrompt) -> None:
        """Give a parked request to the scheduler, with a prompt of the length it turned out."""
        max_model_len = self.vllm_config.model_config.max_model_len
        if len(prompt) >= max_model_len:
            message = f"its input has {len(prompt)} positions, the stage's limit is {max_model_len}"
            self._fail(request.request_id, request.client_index, message)
            return
        sized = _with_prompt(request, list(prompt.token_ids))
        self._fed.replace(sized)
        try:
            super().admit(sized)
        except Exception:  # the boundary of one request: outside it is the end of the core
            logger.exception("request %s could not be added", request.request_id)
            self._fail(request.request_id, request.client_index, "the stage could not take it")
            super().abort_requests([request.request_id])

    def _fail(self, request_id: str, client_index: int, message: str) -> None:
        """End a request with an error that says why."""
        self._fed.drop([request_id])
        if self._streams is not None:
            self._streams.fail([request_id], message)
        reason = f"{RequestFailedError.code} {message}"  # as `decode_reason` reads it
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        outputs = EngineCoreOutputs(outputs=[output], finished_requests={request_id})
        self.output_queue.put_nowait((client_index, outputs))


def _with_prompt(request: Request, token_ids: list[int]) -> Request:
    """The same request with another prompt."""
    return Request(
        request_id=request.request_id,
        prompt_token_ids=token_ids,
        sampling_params=request.sampling_params,
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        priority=request.priority,
        trace_headers=request.trace_headers,
    )
