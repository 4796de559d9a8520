"""How much memory a CPU stage takes for a KV cache whose size nobody gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.cpu_worker import SeededCPUWorker, bytes_for_all_requests

GIB = 1 << 30
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
LAYERS: dict[str, KVCacheSpec] = {"layers.0": FULL, "layers.1": FULL}
MIXED: dict[str, KVCacheSpec] = {"layers.0": FULL, "layers.1": FULL, "layers.2": WINDOW}
BLOCK_BYTES = 2 * 16 * 2 * 32 * 4


def config(max_num_seqs: int, max_model_len: int) -> VllmConfig:
    made = VllmConfig()
    made.model_config = SimpleNamespace(  # type: ignore[assignment]
        max_model_len=max_model_len, original_max_model_len=max_model_len
    )
    made.scheduler_config.max_num_seqs = max_num_seqs
    made.cache_config.kv_cache_layout = "LBNHC"
    return made


def test_every_request_may_be_as_long_as_can_be_and_one_block_is_vllm_s() -> None:
    taken = bytes_for_all_requests(config(max_num_seqs=3, max_model_len=100), dict(LAYERS), GIB)

    num_blocks = taken // (2 * BLOCK_BYTES)
    assert num_blocks == 3 * 7 + 1, "100 tokens are seven blocks of 16"


@pytest.mark.parametrize("layers", [LAYERS, MIXED])
@pytest.mark.parametrize("max_num_seqs", [1, 5])
def test_vllm_plans_a_cache_for_that_many_requests_of_it(
    layers: dict[str, KVCacheSpec], max_num_seqs: int
) -> None:
    wanted = config(max_num_seqs, max_model_len=1000)
    taken = bytes_for_all_requests(wanted, dict(layers), GIB)

    (planned,) = get_kv_cache_configs(wanted, [dict(layers)], [taken])

    concurrency = get_max_concurrency_for_kv_cache_config(wanted, planned)
    assert max_num_seqs <= concurrency < max_num_seqs + 0.1


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, 10 * 2 * BLOCK_BYTES),
        ({"kv_cache_memory_bytes": GIB}, GIB),
        ({"num_gpu_blocks_override": 1000}, GIB),
    ],
)
def test_what_the_operator_gave_stays(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], taken: int
) -> None:
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: GIB)
    worker: Any = object.__new__(SeededCPUWorker)
    worker.vllm_config = config(max_num_seqs=3, max_model_len=48)
    worker.cache_config = worker.vllm_config.cache_config
    for name, value in given.items():
        setattr(worker.cache_config, name, value)
    worker.get_kv_cache_spec = lambda: dict(LAYERS)

    assert abs(worker.determine_available_memory() - taken) < 2 * BLOCK_BYTES


def test_less_than_enough_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: 20 * BLOCK_BYTES)
    worker: Any = object.__new__(SeededCPUWorker)
    worker.vllm_config = config(max_num_seqs=3, max_model_len=1000)
    worker.cache_config = worker.vllm_config.cache_config
    worker.get_kv_cache_spec = lambda: dict(LAYERS)

    assert worker.determine_available_memory() == 20 * BLOCK_BYTES
