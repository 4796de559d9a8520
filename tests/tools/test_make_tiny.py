"""`tools/make_tiny.py` writes a checkpoint that loads, and the same one for the same seed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_tiny import families
from vllm_omni.config.detect import check_weights, detect
from vllm_omni.config.registry import known_pipelines, load_pipeline

TOOL = Path(__file__).resolve().parents[2] / "tools/make_tiny.py"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_the_seed_decides_every_byte_of_a_checkpoint_of_the_family(
    family: str, tmp_path: Path
) -> None:
    tiny = importlib.import_module(families()[family])
    done = make(family, str(tmp_path / "a"), "--seed", "3")
    assert done.returncode == 0, done.stderr
    tiny.make_tiny(tmp_path / "b", 3)
    tiny.make_tiny(tmp_path / "c", 4)

    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    assert sum(map(len, a.values())) < 128 << 20  # a real vocabulary is most of the largest
    name = detect(tmp_path / "a")
    assert name is not None
    package = families()[family].rpartition(".")[0]
    assert known_pipelines()[name].startswith(f"{package}.")
    check_weights(tmp_path / "a", load_pipeline(name, tmp_path / "a"))


def test_a_kind_of_checkpoint_that_a_family_does_not_have_is_refused(tmp_path: Path) -> None:
    done = make("flux", str(tmp_path / "x"), "--variant", "nonsense")

    assert done.returncode == 2
    assert "flux has dev, schnell" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")

    done = make("smol_voice", str(tmp_path))

    assert done.returncode == 1
    assert "not an empty folder" in done.stderr


def test_an_unknown_family_is_refused_with_those_known(tmp_path: Path) -> None:
    done = make("nothing", str(tmp_path / "x"))

    assert done.returncode == 2
    assert "smol_voice" in done.stderr
