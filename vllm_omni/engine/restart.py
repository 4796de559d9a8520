"""How often and how soon a replica may be started again: a budget with back-off. Plain state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni.config.deploy import ServerLimits, StageDeploy


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What one stage allows each of its replicas; see `StageDeploy` and `ServerLimits`."""

    max_restarts: int = 3
    period_s: float = 300.0
    first_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stall_timeout_s: float = 60.0
    """0: nobody looks."""
    drain_timeout_s: float = 30.0

    @classmethod
    def of(cls, deploy: StageDeploy, limits: ServerLimits) -> RestartPolicy:
        return cls(
            max_restarts=deploy.max_restarts,
            period_s=deploy.restart_period_s,
            first_backoff_s=deploy.restart_backoff_s,
            max_backoff_s=deploy.max_restart_backoff_s,
            stall_timeout_s=deploy.stall_timeout_s,
            drain_timeout_s=limits.replica_drain_timeout_s,
        )


class RestartBudget:
    """The restarts of one replica within the period that lies behind."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._restarts: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<RestartBudget {len(self._restarts)} of {self._policy.max_restarts}>"

    def next_delay_s(self) -> float | None:
        """Spend one restart: seconds to wait before it, or None when the budget is spent."""
        now_s, policy = self._clock(), self._policy
        while self._restarts and now_s - self._restarts[0] > policy.period_s:
            self._restarts.popleft()
        if len(self._restarts) >= policy.max_restarts:
            return None
        delay_s = policy.first_backoff_s * 2.0 ** len(self._restarts)
        self._restarts.append(now_s)
        return float(min(delay_s, policy.max_backoff_s))

    def refill(self) -> None:
        """An operator decided: what was spent before does not count."""
        self._restarts.clear()
