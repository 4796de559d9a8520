"""The source tree as parsed files, shared by all checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = "vllm_omni"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One parsed file of the package."""

    path: Path
    """Relative to the project's root."""
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name inside the package: `engine.messages`; the package itself is empty."""
        parts = self.path.with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts and parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The first folder (or file) below the package."""
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Import:
    """One name of the package that a file imports."""

    module: str
    """As in `SourceFile.module`; for `from vllm_omni.a import b` both `a` and `a.b` are tried."""
    line: int
    at_import_time: bool
    """Runs when the module is imported: neither in a function nor for the type checker only."""


def package_files(root: Path) -> list[SourceFile]:
    """Every Python file of the package, parsed."""
    files = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(SourceFile(path.relative_to(root), text, ast.parse(text, str(path))))
    return files


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def imports(file: SourceFile) -> Iterator[Import]:
    """What the file imports from its own package, wherever in the file."""
    yield from _imports(file, file.tree.body, at_import_time=True)


def _imports(file: SourceFile, body: list[ast.stmt], at_import_time: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _imported_modules(file, node):
                yield Import(module, node.lineno, at_import_time)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _imports(file, node.body, at_import_time=False)
            yield from _imports(file, node.orelse, at_import_time)
        else:
            inside = at_import_time and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            children = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
            for handler in getattr(node, "handlers", []):
                children += handler.body
            for case in getattr(node, "cases", []):
                children += case.body
            yield from _imports(file, children, inside)


def _imported_modules(file: SourceFile, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level:
        package = [PACKAGE, *file.module.split(".")]
        if file.path.name != "__init__.py":
            package.pop()
        package = package[: len(package) - node.level + 1]
        base = ".".join(filter(None, [*package, node.module]))
        names = [f"{base}.{alias.name}" for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [n.removeprefix(f"{PACKAGE}.") for n in names if n.startswith(f"{PACKAGE}.")]


def resolve(module: str, known: frozenset[str]) -> str:
    """The longest existing module that `module` (perhaps `module.name`) lies in."""
    while module and module not in known:
        module = module.rpartition(".")[0]
    return module


def call_name(node: ast.Call) -> str:
    """Dotted name of what is called: `asyncio.sleep`; empty when it has none."""
    return dotted(node.func)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes; its tail `.b.c` when it starts with something else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def functions_around(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node with the qualified name of the function or class it stands in."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
        for child in ast.iter_child_nodes(node):
            yield child, name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, f"{name}.{child.name}" if name else child.name)
            else:
                yield from walk(child, name)

    yield from walk(tree, "")
