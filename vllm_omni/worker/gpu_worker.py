"""The CUDA worker of a stage that conditions others or is conditioned."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.stage_runner import StageRunnerMixin


class StageGPURunner(StageRunnerMixin, GPUModelRunner):
    """vLLM's runner with our hooks."""

    def capture_model(self) -> Any:
        # vLLM compiles what its graphs need and the longest step. Kernels that are chosen by the
        # number of tokens would be compiled by the first prompts of each length: seconds each.
        recorded = max(self.compilation_config.cudagraph_capture_sizes or [1])
        for num_tokens in prompt_sizes(recorded, self.max_num_tokens):
            self._dummy_run(num_tokens, skip_eplb=True)
        return super().capture_model()


def prompt_sizes(above: int, limit: int) -> list[int]:
    """Numbers of tokens of a step to try before the first request.

    Two for each doubling; and one token more, since kernels differ for multiples of sixteen.
    """
    sizes = [size * step for step in (2, 3) for size in (1 << k for k in range(limit.bit_length()))]
    chosen = {size for size in sizes if above < size < limit}
    return sorted(chosen | {size + 1 for size in chosen})


class StageGPUWorker(Worker):  # type: ignore[misc]
    """vLLM's worker with our runner."""

    def _make_model_runner(self) -> Any:
        return StageGPURunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Leave room for the rows that lie beside the KV cache."""
        available = int(super().determine_available_memory())
        runner: StageGPURunner = self.model_runner
        return runner.kv_share(available)
