"""torchvision imports in every process, whether its compiled part loads or not."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from vllm_omni.vllm_compat.torchvision_ops import PTH_NAME, SCHEMAS, write_pth

ROOT: Final = Path(__file__).parents[2]

_START_WITH_HOOK: Final = """
import sys
exec(open(sys.argv[1]).read())
assert "vllm_omni" not in sys.modules and "torch" not in sys.modules
sys.path[:0] = [sys.argv[2]]
import json
assert "vllm_omni" not in sys.modules, "the hook acts for torchvision only"
import torchvision
print(torchvision.has_nms)
"""
_TORCHVISION: Final = """
import torch
has_nms = hasattr(torch.ops.torchvision, "nms")
"""


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    assert write_pth(tmp_path)
    return tmp_path / PTH_NAME


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A torchvision that says whether its operators exist when it is imported."""
    folder = tmp_path / "site/torchvision"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_TORCHVISION)
    return folder


def _import_with_hook(hook: Path, package: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", _START_WITH_HOOK, str(hook), str(package.parent)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_missing_operators_are_defined_before_the_import(hook: Path, package: Path) -> None:
    (package / "_C.so").write_bytes(b"wants another torch")

    assert _import_with_hook(hook, package) == "True"


@pytest.mark.slow
def test_a_healthy_torchvision_is_left_alone(hook: Path, package: Path) -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    library = Path(torch.origin).parent / "lib/libtorch_global_deps.so"
    shutil.copy(library, package / "_C.so")

    assert _import_with_hook(hook, package) == "False"


def test_a_hook_that_is_there_is_not_written_again(hook: Path) -> None:
    assert not write_pth(hook.parent)

    hook.write_text("import older\n")
    assert write_pth(hook.parent)
    assert "older" not in hook.read_text()


def test_the_hook_is_one_line_that_python_runs_at_start(hook: Path) -> None:
    text = hook.read_text()

    assert text.startswith("import ")
    assert text.count("\n") == 1


def test_the_operators_have_names_that_torch_takes() -> None:
    names = [schema.partition("(")[0] for schema in SCHEMAS]

    assert len(set(names)) == len(names) > 8


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="not installed")
def test_the_installed_one_resizes_and_serves_transformers() -> None:
    code = """
import torch
from torchvision.transforms.v2 import functional
print(tuple(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))
from transformers import Qwen2VLVideoProcessor
print(Qwen2VLVideoProcessor.__name__)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert result.stdout.split("\n")[:2] == ["(3, 4, 4)", "Qwen2VLVideoProcessor"], result.stderr
