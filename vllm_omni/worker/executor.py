"""The executor of an autoregressive replica with one rank: the worker inside the engine core.

One process per replica and no queue between scheduler and worker. Given to vLLM as an import
path: on CPU vLLM turns the name `uni` into `mp`, but leaves a class alone.
"""

from __future__ import annotations

from typing import Final

from vllm.v1.executor.uniproc_executor import UniProcExecutor

STAGE_EXECUTOR: Final = "vllm_omni.worker.executor.StageExecutor"
"""Value of `distributed_executor_backend`."""


class StageExecutor(UniProcExecutor):
    """vLLM's executor for one rank, under a name that the CPU platform does not rewrite."""
