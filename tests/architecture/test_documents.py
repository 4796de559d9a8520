"""Documents name files that exist, link to pages that exist, and are in the navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
FRONT_PAGES: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
DOCUMENTS: Final = [ROOT / name for name in FRONT_PAGES] + sorted((ROOT / "docs").rglob("*.md"))
MAX_LIFECYCLE_STEPS: Final = 13

_FILE: Final = re.compile(r"(?<![\w/.])((?:vllm_omni|tools|benchmarks|requirements)/[\w/.-]+\.\w+)")
_LINK: Final = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
_MADE_UP: Final = ("tiny_singer",)
"""Names that stand for the reader's own."""


def missing_files(text: str) -> list[str]:
    named = {match for match in _FILE.findall(text) if not any(m in match for m in _MADE_UP)}
    return sorted(name for name in named if not (ROOT / name).exists())


def dead_links(path: Path, text: str) -> list[str]:
    return [link for link in _LINK.findall(text) if not (path.parent / link).exists()]


def _nav_pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _nav_pages(item)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert missing_files(text) == []
    assert dead_links(path, text) == []


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    docs = ROOT / "docs"
    modules = docs / "design/module"
    pages = sorted(
        str(path.relative_to(docs))
        for path in docs.rglob("*.md")
        if not path.is_relative_to(modules)  # the hook adds these
    )

    assert sorted(_nav_pages(nav)) == pages


def test_a_request_is_read_in_thirteen_files() -> None:
    text = (ROOT / "docs/design/request_lifecycle.md").read_text()
    steps = [int(number) for number in re.findall(r"^\*\*(\d+)\. ", text, re.MULTILINE)]

    assert steps == list(range(1, MAX_LIFECYCLE_STEPS + 1))


def test_a_wrong_name_and_a_dead_link_are_found(tmp_path: Path) -> None:
    text = "`vllm_omni/engine/no_such.py`, `vllm_omni/errors.py`, [x](gone.md), [y](https://a.b)"

    assert missing_files(text) == ["vllm_omni/engine/no_such.py"]
    assert dead_links(tmp_path / "page.md", text) == ["gone.md"]
