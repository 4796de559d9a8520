"""The CPU workers of autoregressive stages: of every one, and of one that conditions others or is
conditioned."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import numpy as np
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.stage_runner import StageRunnerMixin

logger = logging.getLogger(__name__)


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

    def determine_available_memory(self) -> int:
        """A cache whose size nobody gave is no larger than its requests can ever fill."""
        available = int(super().determine_available_memory())
        cache = self.cache_config
        if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
            return available
        enough = bytes_for_all_requests(self.vllm_config, self.get_kv_cache_spec(), available)
        if enough < available:
            logger.info("KV cache: %d MiB are enough for all requests", enough >> 20)
        return min(enough, available)


def bytes_for_all_requests(
    vllm_config: Any, specs: dict[str, KVCacheSpec], available_bytes: int
) -> int:
    """What a KV cache takes that holds `max_num_seqs` requests of `max_model_len` tokens each.

    vLLM plans a cache of `available_bytes`; this scales its plan.
    """
    groups = get_kv_cache_groups(vllm_config, specs)
    planned = get_kv_cache_config_from_groups(vllm_config, groups, available_bytes)
    if planned.num_blocks == 0:
        return available_bytes
    blocks_per_request = planned.num_blocks / get_max_concurrency_for_kv_cache_config(
        vllm_config, planned
    )
    # One block is vLLM's own.
    num_blocks = math.ceil(blocks_per_request * vllm_config.scheduler_config.max_num_seqs) + 1
    return math.ceil(num_blocks * available_bytes / planned.num_blocks)


class StageCPUWorker(SeededCPUWorker):
    """The worker of a stage that conditions others or is conditioned."""

    runner_class: ClassVar[type[CPUModelRunner]] = StageCPURunner
