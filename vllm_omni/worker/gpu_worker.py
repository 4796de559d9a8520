"""The CUDA worker of a stage that conditions others or is conditioned."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.gpu_runner import StageGPURunner


class StageGPUWorker(Worker):  # type: ignore[misc]
    """vLLM's worker with our runner."""

    def _make_model_runner(self) -> Any:
        return StageGPURunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Leave room for the rows that lie beside the KV cache."""
        available = int(super().determine_available_memory())
        runner: StageGPURunner = self.model_runner
        return runner.kv_share(available)
