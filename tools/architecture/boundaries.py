"""What is allowed in one place only: broad excepts, device calls, pickling, the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

from tools.architecture.allowed import BROAD_EXCEPTS, PICKLING_FILES
from tools.architecture.source import SourceFile, call_name, dotted, functions_around, package_files

_BROAD: Final = {"Exception", "BaseException"}
_DEVICE_MODULES: Final = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps", "torch.accelerator")
_PICKLING: Final = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_PICKLING_CALLS: Final = {"recv_pyobj", "send_pyobj"}


def broad_excepts(root: Path, allowed: Set[str] = BROAD_EXCEPTS.keys()) -> list[str]:
    """`except Exception` outside the listed boundaries.

    A handler that always raises again swallows nothing and needs no entry.
    """
    return [
        f"{key.partition(':')[0]}:{line} broad except in {function or 'the module'}: "
        "catch what can happen, or list the boundary in BROAD_EXCEPTS"
        for key, line, function in _broad_handlers(root)
        if key not in allowed
    ]


def stale_boundaries(root: Path, allowed: Set[str] = BROAD_EXCEPTS.keys()) -> list[str]:
    """Entries of the list that no handler needs any more."""
    used = {key for key, _, _ in _broad_handlers(root)}
    return [f"{key}: listed in BROAD_EXCEPTS, not in the code" for key in sorted(allowed - used)]


def _broad_handlers(root: Path) -> list[tuple[str, int, str]]:
    """Key, line and function of each handler or `suppress` that swallows everything."""
    return [
        (f"{file.path}:{function}", line, function)
        for file in package_files(root)
        for line, function in _handlers_of(file)
    ]


def _handlers_of(file: SourceFile) -> Iterator[tuple[int, str]]:
    for node, function in functions_around(file.tree):
        if isinstance(node, ast.ExceptHandler):
            if _is_broad(node.type) and not isinstance(node.body[-1], ast.Raise):
                yield node.lineno, function
        elif isinstance(node, ast.Call) and call_name(node).endswith("suppress"):
            yield from ((node.lineno, function) for argument in node.args if _is_broad(argument))


def _is_broad(node: ast.expr | None) -> bool:
    if node is None:
        return True
    if isinstance(node, ast.Tuple):
        return any(_is_broad(element) for element in node.elts)
    return dotted(node).rpartition(".")[2] in _BROAD


def device_calls(root: Path) -> list[str]:
    """`torch.cuda` and friends outside `platforms/`."""
    return [
        f"{file.path}:{getattr(node, 'lineno', 0)} uses {name}: only platforms/ may"
        for file in package_files(root)
        if file.room != "platforms"
        for node in ast.walk(file.tree)
        for name in _device_names(node)
    ]


def _device_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [dotted(node)] if dotted(node) in _DEVICE_MODULES else []
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith(_DEVICE_MODULES)]
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name for name in names if name.startswith(_DEVICE_MODULES)]
    return []


def pickling(root: Path) -> list[str]:
    """Anything that turns bytes from elsewhere into objects by running their instructions."""
    return [
        f"{file.path}:{getattr(node, 'lineno', 0)} uses {name}"
        for file in package_files(root)
        if str(file.path) not in PICKLING_FILES
        for node in ast.walk(file.tree)
        for name in _pickling_names(node)
    ]


def _pickling_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [a.name for a in node.names if a.name.partition(".")[0] in _PICKLING]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return [module] if module.partition(".")[0] in _PICKLING else []
    if isinstance(node, ast.Call):
        name = call_name(node)
        if name.rpartition(".")[2] in _PICKLING_CALLS or name in {"yaml.load", "yaml.unsafe_load"}:
            return [name]
        if name == "torch.load" and not any(k.arg == "weights_only" for k in node.keywords):
            return ["torch.load without weights_only"]
    return []
