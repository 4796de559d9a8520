"""CI runs the tests that a change can break."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]


def _load() -> ModuleType:
    path = ROOT / ".buildkite/select_steps.py"
    spec = importlib.util.spec_from_file_location("select_steps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ci = _load()
STEPS: Final = [step for area in ci.read_areas() for step in area["steps"]]


def _run_paths() -> set[str]:
    commands = [command for step in STEPS for command in step["commands"]]
    words = {word for command in commands for word in shlex.split(command)}
    return {word for word in words if word.startswith("tests/")}


def test_every_source_file_is_in_an_area() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "vllm_omni").rglob("*.py")]
    narrow = [step for step in STEPS if "vllm_omni/" not in step["source_file_dependencies"]]

    assert [f for f in files if not any(ci.is_needed(step, [f]) for step in narrow)] == []


def test_every_test_file_is_run_by_an_area() -> None:
    run = [ROOT / path for path in _run_paths()]
    files = (ROOT / "tests").rglob("test_*.py")

    assert [file for file in files if not any(file.is_relative_to(path) for path in run)] == []


def test_what_areas_name_exists() -> None:
    named = {path for step in STEPS for path in step["source_file_dependencies"]} | _run_paths()

    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["label"])
def test_a_step_has_a_bound_and_a_device(step: dict[str, object]) -> None:
    assert set(step) == {
        "label",
        "device",
        "timeout_in_minutes",
        "source_file_dependencies",
        "commands",
    }
    assert step["device"] in ci.QUEUES
    assert isinstance(step["timeout_in_minutes"], int)
    assert 0 < step["timeout_in_minutes"] <= 60


def test_a_change_runs_only_what_depends_on_it() -> None:
    step = {**STEPS[0], "source_file_dependencies": ["vllm_omni/metrics/"]}
    area = {"group": "g", "steps": [step]}

    assert ci.select([area], ["vllm_omni/engine/pool.py"]) == []
    assert len(ci.select([area], ["vllm_omni/metrics/table.py"])) == 1
    assert len(ci.select([area], ["pyproject.toml"])) == 1
    assert len(ci.select([area], None)) == 1
