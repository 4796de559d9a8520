"""The CPU worker of a stage that conditions others or is conditioned."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.stage_runner import StageRunnerMixin


class StageCPURunner(StageRunnerMixin, CPUModelRunner):
    """vLLM's runner with our hooks."""


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
