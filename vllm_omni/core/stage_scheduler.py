"""vLLM's scheduler for a conditioned stage: no position runs before its condition is there.

A request that waits for its next condition keeps its KV cache, its place and its slot, and is
hidden from the count of unfinished work, so that a core where all wait sleeps in the kernel.
Conditions travel to the worker with the step that first may use them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.conditioning import Conditioning

STAGE_SCHEDULER: Final = "vllm_omni.core.stage_scheduler.StageScheduler"
"""Value of `scheduler_cls`."""

Updates = list[tuple[str, Conditioning]]

_NEVER: Final = sys.maxsize
_ATTRIBUTE: Final = "omni_conditioning"


def updates_of(output: SchedulerOutput) -> Updates:
    """Conditions that came with a step, in order."""
    updates: Updates = getattr(output, _ATTRIBUTE, [])
    return updates


@dataclass(slots=True)
class _Known:
    """Which positions of a request have their condition."""

    num_positions: int
    is_complete: bool = False
    """All others have the model's constant one."""

    def add(self, update: Conditioning) -> None:
        self.num_positions += sum(map(len, update.steps))
        self.is_complete |= update.is_last


class StageScheduler(AsyncScheduler):
    """See the module. Requests that nothing conditions are scheduled as ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._known: dict[str, _Known] = {}
        self._unsent: Updates = []
        self.num_starved = 0
        """Requests that wait for a condition."""
        super().__init__(*args, **kwargs)

    def condition(self, updates: Iterable[tuple[str, Conditioning]]) -> None:
        """Take conditions of requests that are here, or come next."""
        for request_id, update in updates:
            known = self._known.get(request_id)
            if update.prompt is not None:
                known = self._known[request_id] = _Known(len(update.prompt))
            if known is not None:
                known.add(update)
                self._unsent.append((request_id, update))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._gate()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        if self._unsent and output.total_num_scheduled_tokens:
            setattr(output, _ATTRIBUTE, self._unsent)
            self._unsent = []
        return output

    def get_num_unfinished_requests(self) -> int:
        self._gate()
        return max(0, int(super().get_num_unfinished_requests()) - self.num_starved)

    def _gate(self) -> None:
        """Decide anew who may run; positions count, so it holds for steps that are in flight."""
        self.num_starved = 0
        if not self._known:
            return
        self.num_starved = sum(self._is_starved_when_resumed(r) for r in self.waiting)
        for request in self.running:
            is_starved = self._is_starved(request, request.num_computed_tokens)
            if is_starved or request.next_decode_eligible_step == _NEVER:
                request.next_decode_eligible_step = _NEVER if is_starved else 0
            self.num_starved += is_starved

    def _is_starved(self, request: Request, position: int) -> bool:
        known = self._known.get(request.request_id)
        return known is not None and not known.is_complete and position >= known.num_positions

    def _is_starved_when_resumed(self, request: Request) -> bool:
        """A preempted request's prefill covers all its tokens, the one not yet fed included."""
        return request.status == RequestStatus.PREEMPTED and self._is_starved(
            request, request.num_tokens - 1
        )

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return not self._is_starved_when_resumed(request) and bool(
            super()._handle_blocked_waiting_request(request)
        )

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        if self._known.pop(request.request_id, None) is not None:
            self._unsent = [u for u in self._unsent if u[0] != request.request_id]
        return super()._free_request(request, delay_free_blocks)
