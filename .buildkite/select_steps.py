"""Prints the pipeline steps that a change needs, for `buildkite-agent pipeline upload`.

Reads .buildkite/test_areas/*.yaml. A step runs when a changed file lies under one of its
`source_file_dependencies`; every step runs on the main branch, when nothing tells what changed,
and when the build itself changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, TypedDict

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
AREAS_DIR: Final = ROOT / ".buildkite/test_areas"
ALWAYS_RUN_ALL: Final = (".buildkite/", ".ci/", "Makefile", "pyproject.toml", "requirements/")
QUEUES: Final = {"cpu": "cpu", "gpu": "gpu_1"}


class Step(TypedDict):
    label: str
    device: str
    timeout_in_minutes: int
    source_file_dependencies: list[str]
    commands: list[str]


class Area(TypedDict):
    group: str
    steps: list[Step]


def read_areas(folder: Path = AREAS_DIR) -> list[Area]:
    return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]


def is_needed(step: Step, changed: list[str] | None) -> bool:
    """Whether one of the changed files concerns the step; None: not known what changed."""
    if changed is None or any(path.startswith(ALWAYS_RUN_ALL) for path in changed):
        return True
    prefixes = tuple(step["source_file_dependencies"])
    return any(path.startswith(prefixes) for path in changed)


def select(areas: list[Area], changed: list[str] | None) -> list[dict[str, object]]:
    """The groups of Buildkite steps to run."""
    groups: list[dict[str, object]] = []
    for area in areas:
        steps = [
            {
                "label": step["label"],
                "agents": {"queue": QUEUES[step["device"]]},
                "timeout_in_minutes": step["timeout_in_minutes"],
                "commands": ["make setup", *step["commands"]],
            }
            for step in area["steps"]
            if is_needed(step, changed)
        ]
        if steps:
            groups.append({"group": area["group"], "steps": steps})
    return groups


def changed_files() -> list[str] | None:
    """Files that the pull request changes; None on a branch of its own."""
    base = os.environ.get("BUILDKITE_PULL_REQUEST_BASE_BRANCH")
    if not base:
        return None
    command = ["git", "diff", "--name-only", f"origin/{base}...HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


if __name__ == "__main__":
    json.dump({"steps": select(read_areas(), changed_files())}, sys.stdout, indent=2)
