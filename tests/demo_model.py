"""The demo checkpoint with real weights, assembled once and shared with `make demo`."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.smol_voice.assemble import assemble

DEFAULT_DIR = Path(__file__).resolve().parents[1] / ".demo" / "smol_voice"


@functools.cache
def demo_model_dir() -> Path:
    """The folder; skips the test where the packages with the weights are not installed."""
    try:
        return assemble(os.environ.get("VLLM_OMNI_DEMO_MODEL", DEFAULT_DIR), progress=False)
    except ConfigError as error:
        pytest.skip(str(error))
