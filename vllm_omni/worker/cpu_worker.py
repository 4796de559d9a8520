"""The CPU workers of autoregressive stages: of every one, and of one that conditions others or is
conditioned."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.stage_runner import StageRunnerMixin


class SeededCPURunner(CPUModelRunner):  # type: ignore[misc]  # vLLM is not typed
    """vLLM's runner, where a request with a seed may have its prompt read in parts."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """What is sampled for a request that has read a part of its prompt is thrown away, and vLLM
        sets its generator back. That of a CPU cannot be, so it is not drawn from."""
        generators, unread = self.input_batch.generators, {}
        for row in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]):
            if (generator := generators.pop(int(row), None)) is not None:
                unread[int(row)] = generator
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(unread)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take other weights; vLLM packs those of experts only when it makes their kernel."""
        for module in self.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None
        super().reload_weights(*args, **kwargs)


class StageCPURunner(StageRunnerMixin, SeededCPURunner):
    """With our hooks."""


class SeededCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not typed
    """vLLM's worker with our runner: it takes the class from its module's namespace."""

    runner_class: ClassVar[type[CPUModelRunner]] = SeededCPURunner

    def init_device(self) -> None:
        namespace: Any = vllm_cpu_worker
        theirs = namespace.CPUModelRunner
        namespace.CPUModelRunner = self.runner_class
        try:
            super().init_device()
        finally:
            namespace.CPUModelRunner = theirs


class StageCPUWorker(SeededCPUWorker):
    """The worker of a stage that conditions others or is conditioned."""

    runner_class: ClassVar[type[CPUModelRunner]] = StageCPURunner
