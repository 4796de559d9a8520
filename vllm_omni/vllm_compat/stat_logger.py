"""vLLM's own Prometheus series for several engines of different models in one process.

Why:      each autoregressive replica has its own config and comes and goes on its own; operators
          know the `vllm:` series and their dashboards.
Why not a subclass: it is one, but the base unregisters every `vllm:` series when it is built and
          would register each a second time; both happen through names of its module and class.
Breaks if: the logger makes its series other than by `_gauge_cls`, `_counter_cls`, `_histogram_cls`
          and those of its helpers, or does more with an engine's index than print it.
Remove when: `PrometheusStatLogger` takes a registry, or more labels.
"""

from __future__ import annotations

from typing import Any

import vllm.v1.metrics.loggers as loggers
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

_SERIES: dict[str, Any] = {}


def _shared(kind: type) -> Any:
    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        """The series of this name: made by the first logger, used by all."""
        if name not in _SERIES:
            _SERIES[name] = kind(name, *args, **kwargs)
        return _SERIES[name]

    return staticmethod(make)


def _keep_series() -> None:
    """Stands for vLLM's `unregister_vllm_metrics`, which would end the other replicas' series."""


class _SharedSeries:
    _gauge_cls = _shared(Gauge)
    _counter_cls = _shared(Counter)
    _histogram_cls = _shared(Histogram)


class _SpecDecoding(_SharedSeries, loggers.SpecDecodingProm):
    pass


class _KvConnector(_SharedSeries, loggers.KVConnectorProm):
    pass


class _EcConnector(_SharedSeries, loggers.ECConnectorProm):
    pass


class _Perf(_SharedSeries, loggers.PerfMetricsProm):
    pass


class ReplicaStatLogger(_SharedSeries, loggers.PrometheusStatLogger):
    """The `vllm:` series of one replica; its name is the value of the label `engine`."""

    _spec_decoding_cls = _SpecDecoding
    _kv_connector_cls = _KvConnector
    _ec_connector_cls = _EcConnector
    _perf_metrics_cls = _Perf

    def __init__(self, vllm_config: VllmConfig, replica: str) -> None:
        self._replica = replica
        unregister, loggers.unregister_vllm_metrics = loggers.unregister_vllm_metrics, _keep_series
        try:
            # vLLM takes numbers here, prints them as labels and looks them up again.
            super().__init__(vllm_config, [replica])
        finally:
            loggers.unregister_vllm_metrics = unregister

    def record_step(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Count what one message of the engine core brought."""
        self.record(scheduler_stats, iteration_stats, engine_idx=self._replica)
