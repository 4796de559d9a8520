"""Deadlines of requests: one heap, one timer for the earliest, none per request."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence


class Deadlines:
    """Calls back with the ids that expired. Used on one event loop."""

    _COMPACT_MIN = 1024
    """Below this many entries the heap is not rebuilt."""

    def __init__(
        self, on_expired: Callable[[Sequence[str]], None], clock: Callable[[], float]
    ) -> None:
        self._on_expired = on_expired
        self._clock = clock
        self._live: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: str, deadline_s: float) -> None:
        self._live[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request_id))
        if self._timer is None or deadline_s < self._timer_at:
            self._arm(deadline_s)

    def discard(self, request_id: str) -> None:
        """The request is over. Its heap entry stays until it is due or half of all are dead."""
        self._live.pop(request_id, None)
        if len(self._heap) > max(self._COMPACT_MIN, 2 * len(self._live)):
            self._heap = [(deadline, live) for live, deadline in self._live.items()]
            heapq.heapify(self._heap)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, deadline_s: float) -> None:
        self.close()
        self._timer_at = deadline_s
        delay_s = max(0.0, deadline_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._clock()
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            if self._live.get(request_id) == deadline_s:
                del self._live[request_id]
                expired.append(request_id)
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        if self._heap:
            self._arm(self._heap[0][0])
        if expired:
            self._on_expired(expired)
