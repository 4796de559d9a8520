"""What cannot load is removed or repaired; what loads is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni.errors import VersionError
from vllm_omni.vllm_compat import environment, torchvision_ops


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that `repair` uninstalls, instead of doing it."""
    names: list[str] = []
    monkeypatch.setattr(environment, "uninstall", names.extend)
    return names


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `repair` writes torchvision's import hook, instead of into the environment."""
    path = torchvision_ops.pth_path(tmp_path)
    monkeypatch.setattr(environment, "pth_path", lambda: path)
    monkeypatch.setattr(environment, "write_pth", lambda: torchvision_ops.write_pth(tmp_path))
    return path


def _install(monkeypatch: pytest.MonkeyPatch, errors: dict[str, str | None]) -> None:
    """Pretend that these packages are installed, each with the error its import ends in."""
    monkeypatch.setattr(environment, "is_installed", lambda name: name in errors)
    monkeypatch.setattr(environment, "import_error", lambda name: errors[name])


def test_the_error_of_an_import_is_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "broken_part.py").write_text("raise OSError('libcudart.so: cannot open')\n")
    (tmp_path / "healthy_part.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path)}

    assert environment.import_error("healthy_part", env) is None
    assert environment.import_error("broken_part", env) == "OSError: libcudart.so: cannot open"


def test_a_package_that_cannot_load_is_removed(
    monkeypatch: pytest.MonkeyPatch, removed: list[str]
) -> None:
    _install(monkeypatch, {"torchaudio": "OSError: no CUDA", "torchcodec": None})

    lines = environment.repair()

    assert removed == ["torchaudio"]
    assert lines == ["removed torchaudio, which cannot load here: OSError: no CUDA"]


def test_a_healthy_environment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, removed: list[str], hook: Path
) -> None:
    _install(monkeypatch, {"torchaudio": None, "torchvision": None})

    assert environment.repair() == []
    assert removed == []
    assert not hook.exists()


def test_torchvision_is_kept_and_gets_its_hook(
    monkeypatch: pytest.MonkeyPatch, removed: list[str], hook: Path
) -> None:
    _install(monkeypatch, {"torchvision": "RuntimeError: operator nms does not exist"})

    assert len(environment.repair()) == 1
    assert hook.exists()
    assert removed == []
    assert environment.repair() == []


def test_an_older_hook_is_renewed_although_torchvision_loads_with_it(
    monkeypatch: pytest.MonkeyPatch, hook: Path
) -> None:
    _install(monkeypatch, {"torchvision": None})
    hook.write_text("import sys\n")

    environment.repair()

    assert "torchvision" in hook.read_text()


def test_another_vllm_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise VersionError("needs vLLM 0.32, found vLLM 0.33.0")

    monkeypatch.setattr(environment, "check_vllm", refuse)

    assert environment.main() == 1
    assert capsys.readouterr().err == "needs vLLM 0.32, found vLLM 0.33.0\n"
