"""Where an error of a step comes up, by how many batches are under way at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.worker.executor import StageExecutor


class BrokenWorker:
    def execute_model(self, scheduler_output: object) -> None:
        raise RuntimeError("broken")


def executor(max_concurrent_batches: int) -> Any:
    made: Any = object.__new__(StageExecutor)
    made.vllm_config = SimpleNamespace(max_concurrent_batches=max_concurrent_batches)
    made.driver_worker = BrokenWorker()
    return made


def test_of_one_batch_it_waits_in_the_future() -> None:
    future = executor(1).execute_model(None, non_block=True)
    with pytest.raises(RuntimeError, match="broken"):
        future.result()


def test_of_several_it_is_raised_before_anything_is_planned_upon_it() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        executor(2).execute_model(None, non_block=True)
