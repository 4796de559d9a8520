"""Imports point down, and modules do not import each other in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tools.architecture.source import SourceFile, imports, package_files, resolve

LAYERS: Final[tuple[tuple[str, ...], ...]] = (
    ("", "plugin", "entrypoints", "benchmarks"),
    ("engine",),
    ("model_executor.models", "model_executor"),
    ("core", "worker", "generation", "diffusion", "lora", "quantization", "attention", "profiler"),
    # What rooms say to each other: data and protocols, no behaviour.
    (
        "engine.messages",
        "engine.bridge",
        "engine.stage_client",
        "engine.replica_spec",
        "generation.model",
    ),
    ("distributed", "transformers_utils", "plugins"),
    ("config", "deploy"),
    (
        "config.pipeline",
        "inputs",
        "outputs",
        "metrics",
        "platforms",
        "vllm_compat",
        "errors",
        "envs",
        "version",
    ),
)
"""From the top to the bottom. A module belongs to the longest name here that it lies in, and
imports only from its own layer and those below."""

_RANK: Final = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def rank_of(module: str) -> int | None:
    """The layer of a module, 0 at the top; None for a room that no layer names."""
    while module and module not in _RANK:
        module = module.rpartition(".")[0]
    return _RANK[module] if module else None


def upward_imports(root: Path) -> list[str]:
    """Imports of a higher layer, and rooms that belong to no layer."""
    files = package_files(root)
    known = frozenset(file.module for file in files)
    complaints = []
    for file in files:
        if not file.module:
            continue  # the package itself only points to public names, lazily
        rank = rank_of(file.module)
        if rank is None:
            complaints.append(f"{file.path}: its room is in no layer of LAYERS")
            continue
        for found in imports(file):
            target = resolve(found.module, known)
            target_rank = rank_of(target)
            if target and target_rank is not None and target_rank < rank:
                complaints.append(f"{file.path}:{found.line} imports upward: {target}")
    return complaints


def import_cycles(root: Path) -> list[str]:
    """Groups of modules that import each other while they are being imported."""
    files = package_files(root)
    known = frozenset(file.module for file in files)
    graph = {file.module: _targets(file, known) for file in files}
    return [
        f"modules import each other in a circle: {', '.join(sorted(group))}"
        for group in _circles(graph)
    ]


def _targets(file: SourceFile, known: frozenset[str]) -> frozenset[str]:
    found = {resolve(i.module, known) for i in imports(file) if i.at_import_time}
    return frozenset(found - {file.module, ""})


def _circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other, by peeling off nodes without way in or out."""
    left = {node: {t for t in targets if t in graph} for node, targets in graph.items()}
    while True:
        targeted = {t for targets in left.values() for t in targets}
        ends = {node for node, targets in left.items() if not targets or node not in targeted}
        if not ends:
            break
        left = {node: targets - ends for node, targets in left.items() if node not in ends}
    return [set(left)] if left else []
