"""The skeleton of a family passes its own tests and the project's rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tools.architecture.checks import CHECKS
from tools.new_model import MODELS_DIR, REGISTRY, SkeletonError, write_family

ROOT: Final = Path(__file__).parents[2]

_RUN_TESTS: Final = """
import sys, pytest
import vllm_omni.model_executor.models as models
models.__path__.append(sys.argv[1])
sys.exit(pytest.main(["-q", "--rootdir", sys.argv[2], "--import-mode=importlib", sys.argv[2]]))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / REGISTRY).parent.mkdir(parents=True)
    (tmp_path / REGISTRY).write_text((ROOT / REGISTRY).read_text())
    return tmp_path


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_skeleton_passes_its_own_tests(root: Path) -> None:
    write_family(root, "tiny_singer")
    tests = root / "tests/model_executor/tiny_singer"

    result = _run(sys.executable, "-c", _RUN_TESTS, str(root / MODELS_DIR), str(tests))

    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


def test_the_skeleton_keeps_style_and_architecture(root: Path) -> None:
    write_family(root, "tiny_singer")
    config = str(ROOT / "pyproject.toml")
    ruff = str(Path(sys.executable).with_name("ruff"))

    check = _run(ruff, "check", "--no-cache", "--config", config, str(root))
    layout = _run(ruff, "format", "--no-cache", "--check", "--config", config, str(root))

    assert check.returncode == 0, check.stdout
    assert layout.returncode == 0, layout.stdout
    assert [c for name in CHECKS for c in CHECKS[name](root) if "registry" not in c] == []


def test_nothing_outside_the_folders_changes_but_one_line_of_the_registry(root: Path) -> None:
    before = (root / REGISTRY).read_text().splitlines()

    write_family(root, "tiny_singer")

    after = (root / REGISTRY).read_text().splitlines()
    assert [line for line in after if line not in before] == [
        '    "tiny_singer": "vllm_omni.model_executor.models.tiny_singer.pipeline:PIPELINE",'
    ]
    assert len(after) == len(before) + 1


@pytest.mark.parametrize("name", ["Tiny", "9lives", "a-b", "../x", ""])
def test_a_name_that_is_no_folder_is_refused(name: str, root: Path) -> None:
    with pytest.raises(SkeletonError, match="no name for a folder"):
        write_family(root, name)


def test_an_existing_family_is_not_overwritten(root: Path) -> None:
    write_family(root, "tiny_singer")
    pipeline = root / MODELS_DIR / "tiny_singer/pipeline.py"
    pipeline.write_text("mine")

    with pytest.raises(SkeletonError, match="exists already"):
        write_family(root, "tiny_singer")

    assert pipeline.read_text() == "mine"
