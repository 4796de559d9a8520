"""Every benchmark starts by its path, from any folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = [
    path
    for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_that_imports_its_neighbours_finds_them(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    neighbours = [
        node.lineno
        for node in body
        if isinstance(node, ast.ImportFrom)
        and str(node.module).partition(".")[0] in ("benchmarks", "tools")
    ]
    inserted = [node.lineno for node in body if ast.unparse(node).startswith("sys.path.insert(0")]

    assert not neighbours or (inserted and inserted[0] < neighbours[0])
