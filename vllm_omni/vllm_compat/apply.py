"""Applies the changes that every process needs. Those of one kind of process are made there."""

from __future__ import annotations

import importlib
from typing import Final

EVERYWHERE: Final = (
    "vllm_omni.vllm_compat.onednn_isa",
    "vllm_omni.vllm_compat.segment_names",
    "vllm_omni.vllm_compat.torchvision_ops",
)
"""Modules with a repeatable, cheap `install()`."""


def apply_all() -> None:
    """Install the changes of this process. Repeatable."""
    for name in EVERYWHERE:
        importlib.import_module(name).install()
