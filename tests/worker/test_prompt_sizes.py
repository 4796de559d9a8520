"""Which steps are tried before the first request."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.worker.gpu_worker")

from vllm_omni.worker.gpu_runner import prompt_sizes


def test_two_for_each_doubling_and_one_that_is_no_multiple_of_sixteen() -> None:
    assert prompt_sizes(128, 1024) == [192, 193, 256, 257, 384, 385, 512, 513, 768, 769]


def test_nothing_where_graphs_hold_every_step() -> None:
    assert prompt_sizes(512, 512) == []
