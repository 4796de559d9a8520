"""Wake, never poll: no sleep in the path of a token, no queue that grows without bound."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.architecture.source import SourceFile, call_name, package_files

ENGINE_ROOMS: Final = {"engine", "generation", "distributed", "core", "worker", "diffusion"}
_QUEUES: Final = {
    "asyncio.Queue": "maxsize",
    "asyncio.LifoQueue": "maxsize",
    "asyncio.PriorityQueue": "maxsize",
    "janus.Queue": "maxsize",
    "queue.Queue": "maxsize",
    "queue.LifoQueue": "maxsize",
    "queue.PriorityQueue": "maxsize",
    "multiprocessing.Queue": "maxsize",
}
_UNBOUNDABLE: Final = {"queue.SimpleQueue", "multiprocessing.SimpleQueue"}
_TIMED_WAITS: Final = {"poll", "wait", "get", "join", "wait_for", "acquire", "select"}
_SHORTEST_WAIT_S: Final = 1.0


def sleeps(root: Path) -> list[str]:
    """Sleeps: of a thread anywhere, of a task for a fixed time in the engine rooms."""
    complaints = []
    for file in package_files(root):
        for node in _calls(file):
            name = call_name(node)
            if name == "time.sleep":
                complaints.append(f"{file.path}:{node.lineno} sleeps: wait for the event instead")
            elif file.room in ENGINE_ROOMS and name == "asyncio.sleep" and _is_fixed(node):
                complaints.append(f"{file.path}:{node.lineno} sleeps for a fixed time")
    return complaints


def timed_polls(root: Path) -> list[str]:
    """Loops in the engine rooms that wake up every moment to look."""
    complaints = []
    for file in package_files(root):
        if file.room not in ENGINE_ROOMS:
            continue
        for loop in ast.walk(file.tree):
            if isinstance(loop, ast.While):
                complaints += [
                    f"{file.path}:{node.lineno} polls: {call_name(node)} with a short time-out"
                    for node in ast.walk(loop)
                    if isinstance(node, ast.Call) and _is_short_wait(node)
                ]
    return complaints


def unbounded_queues(root: Path) -> list[str]:
    """Queues without a bound."""
    complaints = []
    for file in package_files(root):
        for node in _calls(file):
            name = call_name(node)
            bound = node.args[0] if node.args else _keyword(node, _QUEUES.get(name, ""))
            is_unbounded = bound is None or (isinstance(bound, ast.Constant) and bound.value == 0)
            if name in _UNBOUNDABLE or (name in _QUEUES and is_unbounded):
                complaints.append(f"{file.path}:{node.lineno} {name} without a bound")
    return complaints


def _calls(file: SourceFile) -> Iterator[ast.Call]:
    return (node for node in ast.walk(file.tree) if isinstance(node, ast.Call))


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg == name), None)


def _is_fixed(node: ast.Call) -> bool:
    """A literal time; `sleep(0)` gives way to other tasks and is none."""
    return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value != 0


def _is_short_wait(node: ast.Call) -> bool:
    method = call_name(node).rpartition(".")[2]
    if method not in _TIMED_WAITS:
        return False
    timeout = _keyword(node, "timeout")
    if timeout is None and method in {"poll", "wait", "join"} and node.args:
        timeout = node.args[0]
    if timeout is None and method == "wait_for" and len(node.args) > 1:
        timeout = node.args[1]
    if not isinstance(timeout, ast.Constant) or not isinstance(timeout.value, int | float):
        return False
    seconds = timeout.value / 1000 if method == "poll" else timeout.value
    return 0 < seconds < _SHORTEST_WAIT_S
