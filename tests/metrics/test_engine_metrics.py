from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.metrics import names
from vllm_omni.metrics.engine_metrics import PrometheusEngineMetrics, hide, show

STAGES = ("asr", "thinker", "voice")
ORDER = ("stage", "replica", "state", "reason", "le")


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry(auto_describe=True)
    yield registry
    hide(registry)


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PrometheusEngineMetrics:
    metrics = PrometheusEngineMetrics(STAGES)
    show(metrics, registry)
    return metrics


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Samples by `name{label,label}`, the label values in the order of `ORDER`."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels[name] for name in ORDER if name in sample.labels)
            found[f"{sample.name.removeprefix(names.PREFIX)}{{{labels}}}"] = sample.value
    return found


def serve_one(metrics: EngineMetrics) -> None:
    """What the engine says about one spoken request."""
    for stage in STAGES:
        metrics.request_submitted(stage)
        metrics.first_output(stage, 0.4)
    metrics.first_audio(0.4)
    metrics.audio_written("voice", audio_s=2.0, wall_s=1.0)
    for stage in STAGES:
        metrics.request_finished(stage, "finished")


def test_every_stage_counts_after_ten_requests(metrics, registry):
    for _ in range(10):
        serve_one(metrics)
    samples = scraped(registry)
    for stage in STAGES:
        assert samples[f"requests_total{{{stage},finished}}"] == 10
        assert samples[f"requests_submitted_total{{{stage}}}"] == 10
        assert samples[f"requests_in_flight{{{stage}}}"] == 0
        assert samples[f"time_to_first_output_seconds_count{{{stage}}}"] == 10
    assert samples["time_to_first_audio_seconds_sum{}"] == pytest.approx(4.0)
    assert samples["real_time_factor_sum{voice}"] == pytest.approx(5.0)
    assert samples["real_time_factor_bucket{voice,0.5}"] == 10
    assert samples["real_time_factor_bucket{voice,0.3}"] == 0
    assert samples["audio_seconds_total{voice}"] == pytest.approx(20.0)
    assert samples["audio_under_runs_total{voice}"] == 0


def test_every_series_of_every_stage_is_there_before_the_first_request(metrics, registry):
    samples = scraped(registry)
    for stage in STAGES:
        assert samples[f"requests_total{{{stage},failed}}"] == 0
        assert samples[f"time_to_first_output_seconds_bucket{{{stage},+Inf}}"] == 0
    assert samples["requests_rejected_total{overloaded}"] == 0


def test_requests_in_a_stage_are_those_that_have_not_left_it(metrics, registry):
    for _ in range(3):
        metrics.request_submitted("thinker")
    metrics.request_finished("thinker", "failed")
    metrics.request_finished("thinker", "aborted")
    samples = scraped(registry)
    assert samples["requests_in_flight{thinker}"] == 1
    assert samples["requests_total{thinker,failed}"] == 1
    assert samples["requests_total{thinker,aborted}"] == 1


def test_audio_of_no_length_has_no_real_time_factor(metrics, registry):
    metrics.audio_written("voice", audio_s=1.0, wall_s=1.5)
    metrics.audio_written("voice", audio_s=0.0, wall_s=1.5)
    assert scraped(registry)["real_time_factor_count{voice}"] == 1


def test_silences_are_counted_and_added_up(metrics, registry):
    metrics.audio_late("voice", 0.25)
    metrics.audio_late("voice", 0.5)
    samples = scraped(registry)
    assert samples["audio_under_runs_total{voice}"] == 2
    assert samples["audio_under_run_seconds_total{voice}"] == 0.75


def test_resubmissions_are_counted_by_the_stage_that_died(metrics, registry):
    metrics.request_resubmitted("voice")
    samples = scraped(registry)
    assert samples["requests_resubmitted_total{voice}"] == 1
    assert samples["requests_resubmitted_total{thinker}"] == 0


def test_a_replicas_state_queue_and_restarts_are_shown(metrics, registry):
    metrics.replica_state("voice", 1, "starting")
    metrics.replica_state("voice", 1, "ready")
    metrics.replica_restarted("voice", 1)
    metrics.replica_started("voice", 1, 2.5)
    metrics.queue_depth("voice", 1, running=3, waiting=2)
    samples = scraped(registry)
    assert samples["replica_state{voice,1,ready}"] == 1
    assert samples["replica_state{voice,1,starting}"] == 0
    assert samples["replica_restarts_total{voice,1}"] == 1
    assert samples["replica_start_seconds{voice,1}"] == 2.5
    assert samples["requests_running{voice,1}"] == 3
    assert samples["requests_waiting{voice,1}"] == 2


def test_watched_replicas_are_asked_at_every_scrape(metrics, registry):
    queues = {"voice": SimpleNamespace(num_running=1, num_waiting=4), "asr": None}
    metrics.watch(
        lambda: [SimpleNamespace(stage=s, replica=0, metrics=q) for s, q in queues.items()]
    )
    assert scraped(registry)["requests_waiting{voice,0}"] == 4
    queues["voice"] = None
    samples = scraped(registry)
    assert samples["requests_waiting{voice,0}"] == 0
    assert samples["requests_running{asr,0}"] == 0


def test_refusals_count_by_reason(metrics, registry):
    metrics.request_rejected("overloaded")
    metrics.request_rejected("overloaded")
    metrics.request_rejected("stopped")
    samples = scraped(registry)
    assert samples["requests_rejected_total{overloaded}"] == 2
    assert samples["requests_rejected_total{stopped}"] == 1


def test_an_event_of_an_unknown_stage_or_reason_counts_and_never_raises(metrics, registry):
    metrics.request_submitted("new")
    metrics.request_finished("new", "vanished")
    metrics.request_rejected("odd")
    samples = scraped(registry)
    assert samples["requests_total{new,vanished}"] == 1
    assert samples["requests_rejected_total{odd}"] == 1


def test_a_later_engine_of_the_process_takes_the_earlier_ones_place(metrics, registry):
    serve_one(metrics)
    show(PrometheusEngineMetrics(STAGES), registry)
    assert scraped(registry)["requests_total{voice,finished}"] == 0
    hide(registry)
    hide(registry)
    assert scraped(registry) == {}


def test_the_table_names_each_series_once_and_all_are_shown(metrics, registry):
    serve_one(metrics)
    metrics.replica_state("voice", 0, "ready")
    listed = [series.name for series in names.ALL]
    assert len(set(listed)) == len(listed)
    shown = {name.partition("{")[0] for name in scraped(registry)}
    for name in listed:
        assert any(one.startswith(name) for one in shown), name


def test_vllm_does_not_take_our_series_for_its_own():
    assert not names.PREFIX.startswith("vllm:")
