"""The executor of an autoregressive replica with one rank: the worker inside the engine core.

One process per replica and no queue between scheduler and worker. Given to vLLM as an import
path: on CPU vLLM turns the name `uni` into `mp`, but leaves a class alone.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.platforms import synchronize_device

STAGE_EXECUTOR: Final = "vllm_omni.worker.executor.StageExecutor"
"""Value of `distributed_executor_backend`."""


class StageExecutor(UniProcExecutor):
    """vLLM's executor for one rank, under a name that the CPU platform does not rewrite."""

    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """As vLLM's, but without a second batch under way an error waits in the future for whoever
        asks for the step's result: there the core knows whose step it was."""
        if self.vllm_config.max_concurrent_batches > 1:
            return super().execute_model(scheduler_output, non_block)  # type: ignore[no-any-return]
        return self.collective_rpc(  # type: ignore[no-any-return]
            "execute_model", args=(scheduler_output,), non_block=non_block, single_value=True
        )

    def forget_step(self) -> None:
        """Make the worker ready for another step after one that raised.

        Raises:
            Exception: a forward of nobody's request fails too: it is not the request.
        """
        self.collective_rpc(_forget_step)


def _forget_step(worker: Any) -> None:
    # What the runner keeps between the forward and the sampling of one step.
    worker.model_runner.execute_model_state = None
    worker.execute_dummy_batch()
    synchronize_device()
