"""Seeds of requests whose prompts are read in parts, on the CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.worker.cpu_worker import SeededCPURunner, StageCPURunner


def test_a_request_that_reads_its_prompt_keeps_its_place_in_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, writes = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    generators = {0: reads, 1: writes}
    runner: Any = object.__new__(SeededCPURunner)
    runner.input_batch = SimpleNamespace(num_reqs=2, generators=generators)
    runner.discard_request_mask = SimpleNamespace(np=np.array([True, False, True]))
    seen: list[dict[int, torch.Generator]] = []

    def sample(self: Any, grammar_output: object) -> None:
        seen.append(dict(self.input_batch.generators))
        raise RuntimeError("a step may fail")

    monkeypatch.setattr(CPUModelRunner, "sample_tokens", sample)
    with pytest.raises(RuntimeError, match="may fail"):
        runner.sample_tokens(None)

    assert seen == [{1: writes}]
    assert runner.input_batch.generators is generators
    assert generators == {0: reads, 1: writes}


def test_every_runner_of_ours_does_so() -> None:
    assert issubclass(StageCPURunner, SeededCPURunner)


def test_vllm_still_sets_generators_back_and_a_cpu_still_cannot() -> None:
    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)

    assert "self.input_batch.generators.get(int(i))" in source
    assert "gen.set_offset(" in source
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()
