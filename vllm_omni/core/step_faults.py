"""A step that raised: the state of the scheduler as it was before it, and what is told of it.

vLLM's scheduler counts a step as done when it is planned. After one that raised, everything that
ran is computed anew: the KV cache is forgotten, and the runner hears of every request again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_omni.generation.memory_errors import is_out_of_memory
from vllm_omni.generation.request import failure_from


@dataclass(frozen=True, slots=True)
class StepFault:
    """What is left of an exception, which itself would hold on to the step's tensors."""

    scheduled: tuple[str, ...]
    """Requests that were in the step."""
    forgotten: frozenset[str]
    """Requests that the runner was told to forget in this step; it may not have got to that."""
    reason: str
    """For the client: `encode_reason`."""
    is_memory: bool

    @classmethod
    def of(cls, error: Exception, output: SchedulerOutput, stage: str) -> StepFault:
        return cls(
            tuple(output.num_scheduled_tokens),
            frozenset(output.finished_req_ids),
            encode_reason(error, stage),
            is_out_of_memory(error),
        )


class StepError(Exception):
    """The worker raised in a step whose requests are known."""

    def __init__(self, fault: StepFault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


def encode_reason(error: Exception, stage: str) -> str:
    """`stop_reason` of a request that ends with an error: the error's code, then its text."""
    failure = failure_from(error, stage)
    return f"{failure.code} {failure.message}"


def decode_reason(reason: int | str | None) -> tuple[str, str] | None:
    """Code and text of an error that the core has told; None: it told none."""
    if not isinstance(reason, str):
        return None
    code, _, text = reason.partition(" ")
    return code, text


def rewind(scheduler: Scheduler, forgotten: Iterable[str]) -> None:
    """Have everything that ran wait again, as if the steps under way had not been planned."""
    scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.reset_encoder_cache()
    for request in scheduler.requests.values():
        # The outputs that would settle these never come.
        request.num_in_flight_tokens = 0
        request.num_stale_output_tokens = 0
        request.drop_stale_output = False
        if request.status is RequestStatus.PREEMPTED and not request.num_output_tokens:
            # The runner may or may not know it: it is made to forget it and told anew.
            request.status = RequestStatus.WAITING
            scheduler.finished_req_ids.add(request.request_id)
    scheduler.finished_req_ids.update(forgotten)
