"""Deadlines that a core keeps by itself, for when nobody is left to abort its requests.

The client's own timer comes first; this one lets go of what a client that hangs has forgotten.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container
from typing import Final

from vllm.sampling_params import SamplingParams

REMAINING_KEY: Final = "omni_remaining_s"
"""Key of `SamplingParams.extra_args`: seconds until the deadline, when the request was sent."""

GRACE_S: Final = 1.0
"""How much later than its client the core ends a request: the client's words are the better."""
_MIN_STALE: Final = 1024


class RequestDeadlines:
    """Deadlines of the requests of one core, by engine request id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: str, params: SamplingParams | None) -> None:
        """Note the deadline of a request that has one."""
        extra = params.extra_args if params is not None else None
        remaining_s = (extra or {}).get(REMAINING_KEY)
        if isinstance(remaining_s, int | float):
            heapq.heappush(self._heap, (self._clock() + remaining_s + GRACE_S, request_id))

    def expired(self, alive: Container[str], num_alive: int) -> list[str]:
        """Take the requests whose deadline has passed; those that are over do not count."""
        now_s = self._clock()
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            if request_id in alive:
                late.append(request_id)
        if len(self._heap) > 2 * num_alive + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
        return late
