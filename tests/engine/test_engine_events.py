"""What the engine tells the metrics of, and when."""

from __future__ import annotations

import pytest

from tests.engine.rig import AUDIO, Rig, running
from tests.fakes import (
    FakeStageClient,
    audio_output,
    failure_output,
    settle,
    text_output,
)
from vllm_omni.engine.admission import Admission
from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.errors import OverloadedError


class Recorder(NullMetrics):
    """Remembers every event that has no duration, and the names of those that have."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.first_outputs_s: list[float] = []

    def request_submitted(self, stage: str) -> None:
        self.events.append(("submitted", stage))

    def request_finished(self, stage: str, reason: str) -> None:
        self.events.append((reason, stage))

    def request_rejected(self, reason: str) -> None:
        self.events.append(("rejected", reason))

    def first_output(self, stage: str, seconds: float) -> None:
        assert seconds >= 0
        self.events.append(("first output", stage))
        self.first_outputs_s.append(seconds)

    def first_audio(self, seconds: float) -> None:
        assert seconds >= 0
        self.events.append(("first audio",))

    def audio_written(self, stage: str, audio_s: float, wall_s: float) -> None:
        assert wall_s >= 0
        self.events.append(("audio", stage, audio_s))

    def replica_state(self, stage: str, replica: int, state: str) -> None:
        self.events.append((state, stage, replica))


def recorded() -> tuple[Rig, Recorder, FakeStageClient, FakeStageClient]:
    metrics, first, second = Recorder(), FakeStageClient(), FakeStageClient()
    return Rig([[first], [second]], metrics=metrics), metrics, first, second


async def test_every_stage_of_a_request_counts() -> None:
    rig, metrics, first, second = recorded()
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        first.emit(text_output("a", "one"))
        first.emit(text_output("a", "two", finished=True), text_output("a", "x", finished=True))
        await settle()
        second.emit(audio_output("a", 12000), audio_output("a", 24000))
        second.emit(audio_output("a", 12000, finished=True))
        await settle()
        assert metrics.events == [
            ("submitted", "s0"),
            ("first output", "s0"),
            ("finished", "s0"),
            ("submitted", "s1"),
            ("first output", "s1"),
            ("first audio",),
            ("finished", "s1"),
            ("audio", "s1", 2.0),
        ]


async def test_the_first_token_counts_though_the_text_leaves_whole() -> None:
    rig, metrics, first, _ = recorded()
    async with running(rig):
        await rig.add("a")
        arrival_s = rig.orchestrator.request_states["a"].arrival_s
        output = text_output("a", "all of it", finished=True)
        output.first_made_s = arrival_s + 0.25
        first.emit(output)
        await settle()
        assert metrics.first_outputs_s == [pytest.approx(0.25)]


async def test_a_failure_counts_where_it_happened() -> None:
    rig, metrics, first, _ = recorded()
    async with running(rig):
        await rig.add("a")
        first.emit(failure_output("a", "NaN"))
        await settle()
        assert metrics.events == [("submitted", "s0"), ("failed", "s0")]


async def test_an_abort_counts_in_every_stage_that_had_the_request() -> None:
    rig, metrics, _, _ = recorded()
    async with running(rig):
        await rig.add("a")
        rig.inbox.abort(["a"])
        await settle()
        assert metrics.events == [("submitted", "s0"), ("aborted", "s0")]


async def test_a_death_counts_the_requests_of_the_replica() -> None:
    rig, metrics, first, _ = recorded()
    async with running(rig):
        await rig.add("a")
        first.crash()
        await settle()
        assert metrics.events == [("submitted", "s0"), ("failed", "s0")]


def test_a_refused_request_counts() -> None:
    metrics = Recorder()
    admission = Admission(1, metrics)
    admission.acquire()
    with pytest.raises(OverloadedError):
        admission.acquire()
    assert metrics.events == [("rejected", "overloaded")]
    admission.release()
    admission.acquire()
