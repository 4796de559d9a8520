"""`import vllm_omni` costs next to nothing, and no heavy library comes with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

HEAVY: Final = ("torch", "vllm", "transformers", "numpy", "fastapi", "onnxruntime", "av")
MAX_IMPORT_S: Final = 0.2
NUM_TRIES: Final = 5

_TIMED_IMPORT: Final = """
import sys, time
assert "vllm_omni" not in sys.modules, "something imports it at Python's start"
start = time.perf_counter()
import vllm_omni
print(time.perf_counter() - start)
print(*sys.modules)
"""


def _import_in_fresh_interpreter() -> tuple[float, set[str]]:
    result = subprocess.run(
        [sys.executable, "-c", _TIMED_IMPORT], capture_output=True, text=True, check=True
    )
    elapsed, modules = result.stdout.splitlines()
    return float(elapsed), set(modules.split())


def test_import_loads_nothing_heavy_in_a_fifth_of_a_second() -> None:
    tries = [_import_in_fresh_interpreter() for _ in range(NUM_TRIES)]

    assert tries[0][1].isdisjoint(HEAVY)
    assert min(elapsed for elapsed, _ in tries) <= MAX_IMPORT_S


def test_public_names_are_listed_without_loading_them() -> None:
    code = "import vllm_omni, sys; print(*dir(vllm_omni)); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert {"Omni", "AsyncOmni", "OmniRequestOutput", "OmniDiffusionSamplingParams"} <= set(
        result.stdout.split()
    )
