"""Admission: how many requests are in flight, counted on the API's loop before anything is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.errors import BadRequestError, OverloadedError


class Admission:
    """Counters of one front end. A request with `n` choices takes `n` places."""

    def __init__(self, max_in_flight: int, metrics: EngineMetrics) -> None:
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.num_preparing = 0
        """Callers inside `place`, whatever of theirs is in flight by now."""
        self._metrics = metrics

    def check(self, num: int = 1) -> None:
        """Refuse what would not fit.

        Raises:
            BadRequestError: `num` would never fit, however long the caller waits.
            OverloadedError: `num` more do not fit now.
        """
        if num > self.max_in_flight:
            raise BadRequestError(
                f"n={num} choices; this server runs {self.max_in_flight} at once", field="n"
            )
        if self.in_flight + num > self.max_in_flight:
            self._refuse(self.in_flight, num)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one caller, from before it makes a request until it has been answered.

        Raises:
            OverloadedError: as many callers as may be in flight have one.
        """
        self.check()
        if self.num_preparing >= self.max_in_flight:
            self._refuse(self.num_preparing, 1)
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def _refuse(self, present: int, num: int) -> NoReturn:
        self._metrics.request_rejected("overloaded")
        raise OverloadedError(
            f"{present} requests are in flight and {num} more would exceed "
            f"max_in_flight={self.max_in_flight}; try again"
        )

    def acquire(self, num: int = 1) -> None:
        self.check(num)
        self.in_flight += num

    def release(self, num: int = 1) -> None:
        self.in_flight -= num
        assert self.in_flight >= 0, "a request was released twice"
