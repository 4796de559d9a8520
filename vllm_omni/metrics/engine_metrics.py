"""The engine's events as Prometheus series, in the registry that `/metrics` shows.

Satisfies `engine/metrics_protocol.py`. Events only count; everything with a name, a label or a
lock happens when somebody scrapes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from vllm_omni.metrics import names
from vllm_omni.metrics.cells import HistogramCell
from vllm_omni.metrics.names import Kind, Series

_FAMILIES: Final = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class QueueFigures(Protocol):
    """What a live replica says of its queue."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class ReplicaFigures(Protocol):
    """One replica as the engine shows it."""

    @property
    def stage(self) -> str: ...

    @property
    def replica(self) -> int: ...

    @property
    def metrics(self) -> QueueFigures | None: ...


class _Stage:
    """What one stage has counted."""

    def __init__(self) -> None:
        self.submitted = 0
        self.resubmitted = 0
        self.finished = dict.fromkeys(names.FINISH_REASONS, 0)
        self.first_output = HistogramCell(names.FIRST_OUTPUT.buckets)
        self.real_time_factor = HistogramCell(names.REAL_TIME_FACTOR.buckets)
        self.audio_length = HistogramCell(names.AUDIO_LENGTH.buckets)
        self.under_runs = 0
        self.silence_s = 0.0


class _Replica:
    """What one replica last said, and how often it came back."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.state = names.REPLICA_STATES[0]
        self.restarts = 0
        self.start_s = 0.0


class PrometheusEngineMetrics(Collector):
    """Counts the engine's events. All stages have all their series from the start, at zero."""

    def __init__(self, stages: Iterable[str]) -> None:
        self._stages = {stage: _Stage() for stage in stages}
        self._replicas: dict[tuple[str, int], _Replica] = {}
        self._figures: Callable[[], Iterable[ReplicaFigures]] = tuple
        self._first_audio = HistogramCell(names.FIRST_AUDIO.buckets)
        self._rejected = dict.fromkeys(names.REJECT_REASONS, 0)
        # Admission may refuse in several threads; everything else is the orchestrator's.
        self._rejected_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<PrometheusEngineMetrics {', '.join(self._stages)}>"

    def request_submitted(self, stage: str) -> None:
        self._stage(stage).submitted += 1

    def request_resubmitted(self, stage: str) -> None:
        self._stage(stage).resubmitted += 1

    def request_finished(self, stage: str, reason: str) -> None:
        finished = self._stage(stage).finished
        finished[reason] = finished.get(reason, 0) + 1

    def request_rejected(self, reason: str) -> None:
        with self._rejected_lock:
            self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def first_output(self, stage: str, seconds: float) -> None:
        self._stage(stage).first_output.observe(seconds)

    def first_audio(self, seconds: float) -> None:
        self._first_audio.observe(seconds)

    def audio_written(self, stage: str, audio_s: float, wall_s: float) -> None:
        if audio_s <= 0:
            return
        counted = self._stage(stage)
        counted.audio_length.observe(audio_s)
        counted.real_time_factor.observe(wall_s / audio_s)

    def audio_late(self, stage: str, seconds: float) -> None:
        counted = self._stage(stage)
        counted.under_runs += 1
        counted.silence_s += seconds

    def queue_depth(self, stage: str, replica: int, running: int, waiting: int) -> None:
        counted = self._replica(stage, replica)
        counted.running, counted.waiting = running, waiting

    def replica_state(self, stage: str, replica: int, state: str) -> None:
        self._replica(stage, replica).state = state

    def replica_restarted(self, stage: str, replica: int) -> None:
        self._replica(stage, replica).restarts += 1

    def replica_started(self, stage: str, replica: int, seconds: float) -> None:
        self._replica(stage, replica).start_s = seconds

    def watch(self, figures: Callable[[], Iterable[ReplicaFigures]]) -> None:
        """Ask for the replicas' queues at every scrape, instead of being told by `queue_depth`."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All series with their values now."""
        for one in self._figures():
            queues = one.metrics
            self.queue_depth(
                one.stage,
                one.replica,
                running=queues.num_running if queues else 0,
                waiting=queues.num_waiting if queues else 0,
            )
        samples = itertools.chain(
            self._stage_samples(), self._replica_samples(), self._server_samples()
        )
        families = {series.name: _family(series) for series in names.ALL}
        for series, labels, value in samples:
            family = families[series.name]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, HistogramCell), f"{series.name} is a histogram"
                family.add_metric(labels, value.cumulative(), value.total)
            else:
                assert isinstance(value, (int, float)), f"{series.name} is a number"
                family.add_metric(labels, value)
        return iter(families.values())

    def _stage(self, name: str) -> _Stage:
        try:
            return self._stages[name]
        except KeyError:
            return self._stages.setdefault(name, _Stage())

    def _replica(self, stage: str, replica: int) -> _Replica:
        try:
            return self._replicas[stage, replica]
        except KeyError:
            return self._replicas.setdefault((stage, replica), _Replica())

    def _stage_samples(self) -> Iterator[_Sample]:
        for name, stage in list(self._stages.items()):
            ended = sum(stage.finished.values())
            for reason, count in list(stage.finished.items()):
                yield names.REQUESTS, [name, reason], count
            yield names.SUBMITTED, [name], stage.submitted
            yield names.RESUBMITTED, [name], stage.resubmitted
            yield names.IN_FLIGHT, [name], max(0, stage.submitted - ended)
            yield names.FIRST_OUTPUT, [name], stage.first_output
            yield names.REAL_TIME_FACTOR, [name], stage.real_time_factor
            yield names.AUDIO_SECONDS, [name], stage.audio_length.total
            yield names.AUDIO_LENGTH, [name], stage.audio_length
            yield names.UNDER_RUNS, [name], stage.under_runs
            yield names.UNDER_RUN_SECONDS, [name], stage.silence_s

    def _replica_samples(self) -> Iterator[_Sample]:
        for (stage, number), replica in list(self._replicas.items()):
            labels = [stage, str(number)]
            yield names.RUNNING, labels, replica.running
            yield names.WAITING, labels, replica.waiting
            yield names.RESTARTS, labels, replica.restarts
            yield names.START_SECONDS, labels, replica.start_s
            for state in names.REPLICA_STATES:
                yield names.REPLICA_STATE, [*labels, state], int(replica.state == state)

    def _server_samples(self) -> Iterator[_Sample]:
        yield names.FIRST_AUDIO, [], self._first_audio
        for reason, count in list(self._rejected.items()):
            yield names.REJECTED, [reason], count


_Sample = tuple[Series, list[str], float | HistogramCell]

_shown: weakref.WeakKeyDictionary[CollectorRegistry, PrometheusEngineMetrics] = (
    weakref.WeakKeyDictionary()
)


def show(metrics: PrometheusEngineMetrics, registry: CollectorRegistry = REGISTRY) -> None:
    """Put the series on `/metrics`. A later engine of the same process takes an earlier's place."""
    hide(registry)
    registry.register(metrics)
    _shown[registry] = metrics


def hide(registry: CollectorRegistry = REGISTRY) -> None:
    """Take the series off `/metrics` again. Repeatable."""
    shown = _shown.pop(registry, None)
    if shown is not None:
        registry.unregister(shown)


def _family(series: Series) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    family = _FAMILIES[series.kind]
    return family(names.PREFIX + series.name, series.help, labels=list(series.labels))
