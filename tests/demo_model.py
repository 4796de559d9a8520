"""The demo checkpoint with real weights, assembled once and shared with `make demo`."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from vllm_omni.model_executor.models.smol_voice.assemble import assemble

DEFAULT_DIR = Path(__file__).resolve().parents[1] / ".demo" / "smol_voice"


@functools.cache
def demo_model_dir() -> Path:
    """The folder. `make setup` brings what it is made of, so a failure fails the test."""
    return assemble(os.environ.get("VLLM_OMNI_DEMO_MODEL", DEFAULT_DIR), progress=False)
