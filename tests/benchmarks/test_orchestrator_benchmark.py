"""The orchestrator's benchmark measures what it says, at a hundredth of its size."""

from __future__ import annotations

from benchmarks.orchestrator import GOALS, measure


async def test_every_promised_figure_is_measured() -> None:
    figures = await measure(0.05)
    assert set(GOALS) <= set(figures)
    assert all(figures[name] > 0 for name in GOALS if name != "rss_growth_mb")
