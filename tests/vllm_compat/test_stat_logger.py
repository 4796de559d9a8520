"""The `vllm:` series of two replicas stand side by side in one registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm.v1.metrics.loggers as loggers
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from tests.ar_replicas import spec_of
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.ar_config import build_vllm_config
from vllm_omni.vllm_compat.stat_logger import ReplicaStatLogger


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("llama"))
    return build_vllm_config(spec_of(folder))[0]


def value(name: str, vllm_config: VllmConfig, replica: str) -> float | None:
    labels = {"model_name": vllm_config.model_config.served_model_name, "engine": replica}
    return REGISTRY.get_sample_value(name, labels)


def test_two_replicas_count_under_their_own_names(vllm_config: VllmConfig) -> None:
    first, second = (ReplicaStatLogger(vllm_config, name) for name in ("asr/0", "thinker/1"))
    stats = IterationStats()
    stats.num_generation_tokens = 7
    first.record_step(SchedulerStats(num_running_reqs=2), stats)
    second.record_step(SchedulerStats(num_running_reqs=5), None)

    assert value("vllm:num_requests_running", vllm_config, "asr/0") == 2
    assert value("vllm:num_requests_running", vllm_config, "thinker/1") == 5
    assert value("vllm:generation_tokens_total", vllm_config, "asr/0") == 7
    assert value("vllm:generation_tokens_total", vllm_config, "thinker/1") == 0


def test_a_restarted_replica_goes_on_counting(vllm_config: VllmConfig) -> None:
    for _ in range(2):
        stats = IterationStats()
        stats.num_generation_tokens = 3
        ReplicaStatLogger(vllm_config, "voice/9").record_step(None, stats)

    assert value("vllm:generation_tokens_total", vllm_config, "voice/9") == 6


def test_vllm_s_own_function_is_put_back_and_still_needs_us(vllm_config: VllmConfig) -> None:
    ReplicaStatLogger(vllm_config, "asr/0")

    assert loggers.unregister_vllm_metrics is unregister_vllm_metrics
