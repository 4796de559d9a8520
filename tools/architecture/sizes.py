"""Files and functions stay readable."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

MAX_FILE_LINES: Final = {
    "vllm_omni": 400,
    "tools": 400,
    "benchmarks": 400,
    "examples": 80,
    "tests": 500,  # one case after the other: nobody has to hold it all in mind
}
MAX_FUNCTION_LINES: Final = 60
"""Without the docstring: nobody should save on that."""


def oversized(root: Path) -> list[str]:
    """Files and functions over their budgets. There is no list of exceptions."""
    complaints = []
    for folder, max_lines in MAX_FILE_LINES.items():
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(root)
            num_lines = text.count("\n")
            if num_lines > max_lines:
                complaints.append(f"{name}: {num_lines} lines, at most {max_lines}")
            complaints += [f"{name}:{text}" for text in _long_functions(ast.parse(text, str(name)))]
    return complaints


def _long_functions(tree: ast.Module) -> list[str]:
    return [
        f"{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (num_lines := _num_code_lines(node)) > MAX_FUNCTION_LINES
    ]


def _num_code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    num_lines = _num_lines(node)
    return num_lines - _num_lines(node.body[0]) if ast.get_docstring(node) else num_lines


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
