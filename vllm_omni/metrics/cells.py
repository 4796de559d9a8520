"""Counts that cost well under a microsecond to change: plain numbers, read at a scrape.

One thread writes a cell; a scrape in another may see a request half-counted, never a torn number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class HistogramCell:
    """Observations by bucket."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of what was observed."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bound and count at or below it, as Prometheus has histograms."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
