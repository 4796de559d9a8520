"""The shell scripts behind the Makefile, in a project of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PASSES: Final = "def test_it() -> None:\n    pass\n"
FAILS: Final = "def test_it() -> None:\n    raise AssertionError\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("setup_venv.sh", "test_layers.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _run(project: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"tools/{script}", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **variables},
    )


def _layers(project: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    interpreter = project / ".venv/bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    for name, text in files.items():
        path = project / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return _run(project, "test_layers.sh")


def test_an_unknown_build_is_refused_before_anything_is_made(project: Path) -> None:
    result = _run(project, "setup_venv.sh", EXTRA="tpu")

    assert result.returncode == 1
    assert result.stderr == "setup: EXTRA must be cpu or cuda, got 'tpu'\n"
    assert not (project / ".venv").exists()


def test_a_python_that_does_not_fit_is_refused(project: Path) -> None:
    result = _run(project, "setup_venv.sh", EXTRA="cpu", PYTHON="/bin/false")

    assert result.returncode == 1
    assert "setup: needs Python 3.11 to 3.14" in result.stderr
    assert not (project / ".venv").exists()


def test_layers_run_cheapest_first_and_an_empty_one_is_no_failure(project: Path) -> None:
    result = _layers(
        project,
        {
            "room/test_a.py": PASSES,
            "room/test_b.py": f"import pytest\n\n@pytest.mark.slow\n{PASSES}",
            "integration/test_d.py": f"import pytest\n\n@pytest.mark.alone\n{PASSES}",
            "e2e/test_c.py": PASSES,
        },
    )

    assert result.returncode == 0, result.stdout + result.stderr
    layers = [line for line in result.stdout.splitlines() if line.startswith("==>")]
    assert layers == [
        "==> tests: unit (not gpu)",
        "==> tests: integration (not gpu and not alone)",
        "==> tests: integration (not gpu and alone)",
        "==> tests: parity (not gpu)",
        "==> tests: e2e (not gpu)",
    ]
    assert result.stdout.count("1 passed") == 4


def test_a_failed_layer_fails_the_run_after_all_layers_ran(project: Path) -> None:
    result = _layers(project, {"room/test_a.py": FAILS, "e2e/test_c.py": PASSES})

    assert result.returncode == 1
    assert "tests failed: unit" in result.stderr
    assert "==> tests: e2e" in result.stdout


def test_no_unit_test_at_all_is_a_failure(project: Path) -> None:
    result = _layers(project, {"e2e/test_c.py": PASSES})

    assert result.returncode == 1
    assert "tests failed: unit" in result.stderr
