"""The life of one replica: one enum, one table, one setter.

A replica is a slot of its stage for as long as the server lives; what comes and goes are its
incarnations. Changed on the orchestrator's loop only; `status` may be read from any thread.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.restart import RestartBudget

logger = logging.getLogger(__name__)


class ReplicaState(enum.StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    """Its process loads, or waits for its device; no request reaches it."""
    READY = "ready"
    """A real request went through it; it serves."""
    DRAINING = "draining"
    """No new requests; what it has may finish."""
    BACKOFF = "backoff"
    """It died or did not start, and is started again at a known time."""
    STOPPED = "stopped"
    """Nothing brings it back but an operator: drained, or its restart budget is spent."""


_NEXT: Final[Mapping[ReplicaState, frozenset[ReplicaState]]] = {
    ReplicaState.STARTING: frozenset(
        {ReplicaState.READY, ReplicaState.BACKOFF, ReplicaState.STOPPED}
    ),
    ReplicaState.READY: frozenset(
        {ReplicaState.DRAINING, ReplicaState.BACKOFF, ReplicaState.STOPPED}
    ),
    ReplicaState.DRAINING: frozenset({ReplicaState.STARTING, ReplicaState.STOPPED}),
    ReplicaState.BACKOFF: frozenset({ReplicaState.STARTING, ReplicaState.STOPPED}),
    ReplicaState.STOPPED: frozenset({ReplicaState.STARTING}),
}
"""The only transitions there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as `/health` and the operators' routes show it."""

    stage: str
    replica: int
    state: str
    incarnation: int
    """How many times it was started, the first start included."""
    restarts: int
    """How many times it served again after it had not."""
    last_error: str | None
    """Why it died or did not start the last time."""
    start_took_s: float | None
    """How long its latest start took, from the spawn to its first request; None before one."""
    next_attempt_in_s: float | None
    """Until it is started again; only in `backoff`."""


class Replica:
    """One slot of a stage through all its incarnations."""

    def __init__(
        self,
        spec: ReplicaSpec,
        budget: RestartBudget,
        clock: Callable[[], float],
        on_change: Callable[[Replica], None],
    ) -> None:
        self.budget = budget
        self.incarnation = 0
        self.num_restarts = 0
        self.last_error: str | None = None
        self.next_attempt_s: float | None = None
        self.start_took_s: float | None = None
        """How long its latest start took, from the spawn to its first request."""
        self._spec = spec
        self._clock = clock
        self._on_change = on_change
        self._state = ReplicaState.STOPPED

    def __repr__(self) -> str:
        error = f" ({self.last_error})" if self.last_error else ""
        return f"<Replica {self.name} {self._state} restarts={self.num_restarts}{error}>"

    @property
    def name(self) -> str:
        """`voice/0`."""
        return self._spec.name

    @property
    def stage(self) -> str:
        return self._spec.stage

    @property
    def stage_id(self) -> int:
        return self._spec.stage_id

    @property
    def replica_id(self) -> int:
        return self._spec.replica_id

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def is_serving(self) -> bool:
        """A process of it may have requests."""
        return self._state in (ReplicaState.READY, ReplicaState.DRAINING)

    @property
    def is_waiting(self) -> bool:
        return self._state is ReplicaState.BACKOFF

    @property
    def is_busy(self) -> bool:
        """Something is being done with it that must end first."""
        return self._state in (ReplicaState.STARTING, ReplicaState.DRAINING)

    def become(self, state: ReplicaState, *, next_attempt_s: float | None = None) -> None:
        """The one setter.

        Raises:
            ValueError: the table has no such transition.
        """
        if state not in _NEXT[self._state]:
            raise ValueError(f"{self!r} cannot become {state}")
        if state is ReplicaState.STARTING:
            self.incarnation += 1
        self.next_attempt_s = next_attempt_s
        self._state = state
        self._on_change(self)

    def next_spec(self) -> ReplicaSpec:
        """What the incarnation that is starting is told."""
        return dataclasses.replace(self._spec, incarnation=self.incarnation)

    def expected_s(self) -> float | None:
        """When it may serve again at the latest guess; None: nobody brings it back."""
        took_s = self.start_took_s or 0.0
        match self._state:
            case ReplicaState.READY:
                return self._clock()
            case ReplicaState.STARTING:
                return self._clock() + took_s
            case ReplicaState.BACKOFF:
                return (self.next_attempt_s or self._clock()) + took_s
            case _:
                return None

    def status(self) -> ReplicaStatus:
        next_s = self.next_attempt_s
        return ReplicaStatus(
            stage=self.stage,
            replica=self.replica_id,
            state=str(self._state),
            incarnation=self.incarnation,
            restarts=self.num_restarts,
            last_error=self.last_error,
            start_took_s=self.start_took_s,
            next_attempt_in_s=None if next_s is None else max(0.0, next_s - self._clock()),
        )
