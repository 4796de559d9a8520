"""Every wait ends: each one that has no time-out of its own has an owner who ends it.

A wait is an `await` of a queue, an event, a future or a socket, and a blocking call of a thread
(`poll`, `join`, `recv`). It is bounded when it names a time-out, or stands inside
`asyncio.timeout`. All others are listed in `OWNED_WAITS` with who ends them, and when.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tools.architecture.allowed import OWNED_WAITS
from tools.architecture.source import SourceFile, call_name, package_files

ROOMS: Final = {"engine", "distributed"}
_AWAITED_CALLS: Final = {
    "acquire", "enter_async_context", "gather", "get", "get_output_async", "get_outputs_async",
    "join", "read", "recv", "recv_multipart", "send", "send_multipart", "shield", "take", "wait",
    "wait_closed", "wait_for",
}  # fmt: skip
"""Methods that return when somebody else did something."""
_BLOCKING_CALLS: Final = {"poll", "join", "recv", "recv_multipart", "recv_pyobj", "select"}
_NOT_BLOCKING: Final = {"NOBLOCK", "DONTWAIT", "MSG_DONTWAIT"}
_NO_WAITS: Final = {"select.poll", "os.path.join"}
_TIMEOUTS: Final = {"timeout", "timeout_s"}
_POSITION: Final = {"wait_for": 1, "join": 0, "poll": 0, "select": 3}
"""Where a call takes its time-out when it is not named."""


def endless_waits(root: Path, owned: Mapping[str, str] = OWNED_WAITS) -> list[str]:
    """Waits without a time-out that nobody owns."""
    return [
        f"{key.partition(':')[0]}:{line} waits for ever in {key.partition(':')[2]}: "
        "give it a time-out, or list who ends it in OWNED_WAITS"
        for key, line in _unbounded(root)
        if key not in owned
    ]


def stale_owners(root: Path, owned: Mapping[str, str] = OWNED_WAITS) -> list[str]:
    """Entries of the list that no wait needs any more."""
    used = {key for key, _ in _unbounded(root)}
    return [f"{key}: listed in OWNED_WAITS, not in the code" for key in sorted(set(owned) - used)]


def _unbounded(root: Path) -> list[tuple[str, int]]:
    """`path:function:what` and line of each wait without a time-out."""
    return [
        (f"{file.path}:{function}:{what}", line)
        for file in package_files(root)
        if file.room in ROOMS
        for line, function, what in _waits_of(file)
    ]


def _waits_of(file: SourceFile) -> Iterator[tuple[int, str, str]]:
    yield from _walk(file.tree, "", has_timeout=False)


def _walk(node: ast.AST, function: str, *, has_timeout: bool) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".removeprefix(".")
        has_timeout = False
    elif isinstance(node, ast.AsyncWith):
        has_timeout = has_timeout or any(_is_timeout(item.context_expr) for item in node.items)
    if not has_timeout and (what := _wait(node)):
        yield getattr(node, "lineno", 0), function, what
    inner = node.value if isinstance(node, ast.Await) else None
    for child in ast.iter_child_nodes(node):
        if child is inner and isinstance(child, ast.Call):
            # What is awaited was judged with its await; its arguments are judged by themselves.
            for part in ast.iter_child_nodes(child):
                yield from _walk(part, function, has_timeout=has_timeout)
        else:
            yield from _walk(child, function, has_timeout=has_timeout)


def _is_timeout(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and call_name(node) in {
        "asyncio.timeout",
        "asyncio.timeout_at",
    }


def _wait(node: ast.AST) -> str:
    """What an unbounded wait waits for, in the code's own words; empty for everything else."""
    if isinstance(node, ast.Await):
        value = node.value
        if not isinstance(value, ast.Call):
            return ast.unparse(value)
        method = _method(value)
        is_wait = method in _AWAITED_CALLS and not _names_timeout(value, method)
        return ast.unparse(value.func) if is_wait else ""
    if isinstance(node, ast.Call):
        name, method = ast.unparse(node.func), _method(node)
        if method in _BLOCKING_CALLS and name not in _NO_WAITS and not _is_string_join(node):
            may_block = not _names_timeout(node, method) and not _is_nonblocking(node)
            return name if may_block else ""
    return ""


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _names_timeout(node: ast.Call, method: str) -> bool:
    position = _POSITION.get(method)
    given = [k.value for k in node.keywords if k.arg in _TIMEOUTS]
    if position is not None:
        given += node.args[position : position + 1]
    return any(not (isinstance(one, ast.Constant) and one.value is None) for one in given)


def _is_nonblocking(node: ast.Call) -> bool:
    words = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return bool(words & _NOT_BLOCKING)


def _is_string_join(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant)
