"""The CPU worker of a stage that conditions others or is conditioned."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.stage_runner import StageRunnerMixin


class StageCPURunner(StageRunnerMixin, CPUModelRunner):
    """vLLM's runner with our hooks."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take other weights; vLLM packs those of experts only when it makes their kernel."""
        for module in self.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None
        super().reload_weights(*args, **kwargs)


class StageCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker with our runner: it takes the class from its module's namespace."""

    def init_device(self) -> None:
        namespace: Any = vllm_cpu_worker
        theirs = namespace.CPUModelRunner
        namespace.CPUModelRunner = StageCPURunner
        try:
            super().init_device()
        finally:
            namespace.CPUModelRunner = theirs
