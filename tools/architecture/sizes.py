"""Files and functions stay readable."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60
FOLDERS: Final = ("vllm_omni", "tools", "benchmarks", "examples", "tests")


def oversized(root: Path) -> list[str]:
    """Files and functions over their budgets. There is no list of exceptions."""
    complaints = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(root)
            num_lines = text.count("\n")
            if num_lines > MAX_FILE_LINES:
                complaints.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
            complaints += [f"{name}:{text}" for text in _long_functions(ast.parse(text, str(name)))]
    return complaints


def _long_functions(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(
                    f"{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"
                )
    return found
