"""Which request of a step that raised it was: suspects run apart until one of them raises alone.

Works on the queues of vLLM's scheduler, between two steps. A group runs alone: whatever else wants
to run is held back meanwhile, computed anew afterwards, and loses nothing but time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class Quarantine:
    """The suspects of one core. Does nothing as long as no step has raised."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: deque[list[str]] = deque()
        """Suspects that have not run apart yet."""
        self._current: dict[str, int] = {}
        """Those that run now, and the tokens each had written when they began."""
        self._held: list[Request] = []

    def __repr__(self) -> str:
        return (
            f"<Quarantine current={len(self._current)} groups={len(self._groups)} "
            f"held={len(self._held)}>"
        )

    def __len__(self) -> int:
        """Requests held back, which the scheduler does not count."""
        return sum(not request.is_finished() for request in self._held)

    def accuse(self, scheduled: Iterable[str]) -> str | None:
        """A step of these requests raised: the one that did it, or None while it may be several.

        Nobody may be running any more.
        """
        suspects = [request_id for request_id in scheduled if self._is_alive(request_id)]
        others = [i for i in self._current if i not in suspects and self._is_alive(i)]
        self._current = {}
        if others:
            self._groups.appendleft(others)
        if len(suspects) == 1:
            return suspects[0]
        if suspects:
            half = len(suspects) // 2
            self._groups.extendleft([suspects[half:], suspects[:half]])
        return None

    def arrange(self) -> None:
        """Before a step: have the scheduler see only who may run in it."""
        if not self._groups and not self._current and not self._held:
            return
        self._go_on()
        if not self._current:
            self._let_all_go()
            return
        waiting = self._scheduler.waiting
        strangers = [one for one in waiting if one.request_id not in self._current]
        waiting.remove_requests(strangers)
        self._scheduler.deferred_waiting.difference_update(strangers)
        self._held += strangers

    def _go_on(self) -> None:
        """Take the next group when every member of this one has got further or has ended."""
        if any(self._is_stuck(*member) for member in self._current.items()):
            return
        self._current = {}
        while self._groups and not self._current:
            requests = self._scheduler.requests
            self._current = {
                request_id: requests[request_id].num_output_tokens
                for request_id in self._groups.popleft()
                if self._is_alive(request_id)
            }
        if self._current:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
            self._let_all_go()

    def _let_all_go(self) -> None:
        """Those held back wait in the scheduler again, in the order in which they came."""
        held, self._held = self._held, []
        alive = [request for request in held if not request.is_finished()]
        for request in reversed(alive):
            self._scheduler.waiting.prepend_request(request)

    def _is_alive(self, request_id: str) -> bool:
        request = self._scheduler.requests.get(request_id)
        return request is not None and not request.is_finished()

    def _is_stuck(self, request_id: str, num_tokens: int) -> bool:
        return (
            self._is_alive(request_id)
            and self._scheduler.requests[request_id].num_output_tokens <= num_tokens
        )
