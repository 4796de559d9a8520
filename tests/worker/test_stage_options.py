"""Options of our runner travel as plain data."""

from __future__ import annotations

import json

import pytest

from vllm_omni.config.pipeline import CaptureScope
from vllm_omni.worker.stage_options import StageOptions


@pytest.mark.parametrize(
    "options",
    [
        StageOptions(),
        StageOptions(is_conditioned=True),
        StageOptions(capture_layers=(), capture_scope=CaptureScope.ALL),
        StageOptions(capture_layers=(24, -1), capture_scope=CaptureScope.MEDIA),
    ],
)
def test_round_trip(options: StageOptions) -> None:
    assert StageOptions.of(json.loads(json.dumps(options.as_config()))) == options


def test_stages_without_them_have_the_defaults() -> None:
    assert StageOptions.of({}) == StageOptions()
