"""The site shows what the code has."""

from __future__ import annotations

import pytest

from tools.mkdocs_hooks import METRICS_MARK, metrics_table, on_page_markdown
from vllm_omni.metrics import names


def test_every_series_has_a_row() -> None:
    table = metrics_table()
    series = [value for value in vars(names).values() if isinstance(value, names.Series)]

    assert len(series) > 5
    assert table.count("\n") == len(series) + 1
    for one in series:
        assert f"`{names.PREFIX}{one.name}" in table


def test_the_mark_becomes_the_table(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs/reference/metrics.md").read_text()

    assert page.count(METRICS_MARK) == 1
    assert metrics_table() in on_page_markdown(page, None, None, None)  # type: ignore[arg-type]
