"""The model of `tests/trio.py` as a folder on disk and a line in the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trio import write_model
from vllm_omni.config import registry


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "PIPELINES", {"test_trio": "tests.trio:PIPELINE"})
    folder = tmp_path / "model"
    folder.mkdir()
    return write_model(folder)
