"""`import vllm_omni` costs next to nothing, and no heavy library comes with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

HEAVY: Final = ("torch", "vllm", "transformers", "numpy", "fastapi", "onnxruntime", "av")

_IMPORT: Final = """
import sys
assert "vllm_omni" not in sys.modules, "something imports it at Python's start"
import vllm_omni
print(*sys.modules)
"""


def _modules_of_a_fresh_interpreter() -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert _modules_of_a_fresh_interpreter().isdisjoint(HEAVY)


def test_public_names_are_listed_without_loading_them() -> None:
    code = "import vllm_omni, sys; print(*dir(vllm_omni)); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert {"Omni", "AsyncOmni", "OmniRequestOutput", "OmniDiffusionSamplingParams"} <= set(
        result.stdout.split()
    )
