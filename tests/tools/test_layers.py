"""Every test belongs to one layer, by its folder and marks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("layers", Path(__file__).parents[1] / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_layers = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_layers)


@pytest.mark.parametrize(
    ("path", "marks", "layer"),
    [
        ("engine/test_pool.py", [], "unit"),
        ("engine/test_pool.py", ["asyncio"], "unit"),
        ("engine/test_pool.py", ["slow"], "integration"),
        ("model_executor/test_voice.py", ["weights"], "integration"),
        ("integration/test_start.py", [], "integration"),
        ("parity/test_voice.py", ["slow", "weights"], "parity"),
        ("e2e/test_chat.py", ["slow"], "e2e"),
        ("dfx/reliability/test_killed.py", ["slow"], "dfx"),
    ],
)
def test_the_layer_of_a_test(path: str, marks: list[str], layer: str) -> None:
    assert _layers.layer_of(Path(path), marks) == layer
