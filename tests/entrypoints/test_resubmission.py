"""A request whose replica died before anything of it reached the caller is submitted once more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.entrypoints.voice_rig import DELTA, collect, text_of
from tests.fakes import (
    FakePreparer,
    FakeStageClient,
    chain_pipeline,
    eventually,
    fake_omni,
    says,
    text_output,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import (
    DeadlineExceededError,
    ReplicaDiedError,
    RequestFailedError,
    StageUnavailableError,
)


class CountingMetrics(NullMetrics):
    def __init__(self) -> None:
        self.resubmitted: list[str] = []

    def request_resubmitted(self, stage: str) -> None:
        self.resubmitted.append(stage)


class Pair:
    """One text stage with replicas that a test plays."""

    def __init__(self, num_replicas: int, mode: str, deploy: dict[str, Any]) -> None:
        self.replicas = [FakeStageClient() for _ in range(num_replicas)]
        self.metrics = CountingMetrics()
        self.preparer = FakePreparer()
        self.omni: AsyncOmni = fake_omni(
            chain_pipeline(1),
            [self.replicas],
            limits=ServerLimits(resubmit=mode),
            metrics=self.metrics,
            preparers={"s0": self.preparer},
            deploy=deploy,
        )

    def ask(self, params: SamplingParams = DELTA, **kwargs: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(collect(self.omni.generate("hi", params, "mine", **kwargs)))

    async def reached(self, replica_id: int, num_requests: int = 1) -> None:
        await eventually(lambda: len(self.replicas[replica_id].added) == num_requests)

    async def is_clean(self) -> bool:
        orchestrator = self.omni.engine._orchestrator
        assert orchestrator is not None
        await eventually(lambda: not orchestrator.request_states and not len(self.omni._router))
        return self.omni._admission.in_flight == 0 and not self.omni._internal_ids


@asynccontextmanager
async def pair(num_replicas: int = 2, mode: str = "live", **deploy: Any) -> AsyncIterator[Pair]:
    async with asyncio.timeout(30):
        stages = Pair(num_replicas, mode, deploy)
        async with stages.omni:
            yield stages


async def test_another_replica_takes_it_and_the_caller_does_not_notice() -> None:
    async with pair() as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[1].script = says("Hello ", "there.")
        stages.replicas[0].crash()
        outputs = await reading
        assert text_of(outputs) == "Hello there."
        assert {output.request_id for output in outputs} == {"mine"}
        assert outputs[-1].timings["s0"].attempt == 2
        assert stages.metrics.resubmitted == ["s0"]
        first, second = stages.replicas[0].added[0], stages.replicas[1].added[0]
        assert first.request_id != second.request_id
        assert first.deadline_s == second.deadline_s
        assert await stages.is_clean()


async def test_a_request_that_has_its_first_attempt_says_so() -> None:
    async with pair(1) as stages:
        stages.replicas[0].script = says("hi")
        assert (await stages.ask())[-1].timings["s0"].attempt == 1
        assert stages.metrics.resubmitted == []


async def test_once_something_was_read_it_fails() -> None:
    async with pair() as stages:
        stages.replicas[0].script = lambda request: [text_output(request.request_id, "Hel")]
        stream = stages.omni.generate("hi", DELTA)
        assert (await anext(stream)).text == "Hel"
        stages.replicas[0].crash("killed by a test")
        with pytest.raises(ReplicaDiedError, match="killed by a test") as raised:
            await anext(stream)
        assert raised.value.retryable
        assert stages.replicas[1].added == []
        assert await stages.is_clean()


async def test_what_was_made_but_not_read_is_dropped() -> None:
    async with pair() as stages:
        stages.replicas[1].script = says("anew")
        stages.replicas[0].script = lambda request: [text_output(request.request_id, "old ")]
        stream = stages.omni.generate("hi", DELTA)
        first = asyncio.ensure_future(anext(stream))
        await stages.reached(0)
        stages.replicas[0].crash()  # both are on their way when the reader gets its turn
        text = (await first).text
        if text == "old ":
            with pytest.raises(ReplicaDiedError):
                await anext(stream)
        else:
            assert text == "anew"
        await stream.aclose()


async def test_it_is_submitted_again_only_once() -> None:
    async with pair() as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].crash("the first")
        await stages.reached(1)
        stages.replicas[1].crash("the second")
        with pytest.raises(ReplicaDiedError, match="the second"):
            await reading
        assert stages.metrics.resubmitted == ["s0"]
        assert await stages.is_clean()


@pytest.mark.parametrize(("num_replicas", "mode"), [(1, "live"), (2, "never")])
async def test_it_fails_at_once_in_the_replicas_own_words(num_replicas: int, mode: str) -> None:
    async with pair(num_replicas, mode) as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].crash("CUDA out of memory")
        with pytest.raises(ReplicaDiedError, match="CUDA out of memory"):
            await reading
        assert stages.metrics.resubmitted == []
        assert await stages.is_clean()


async def test_a_session_is_not_submitted_again() -> None:
    async with pair() as stages:
        stages.omni._prepare = with_session(stages.omni._prepare)  # type: ignore[method-assign]
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].crash()
        with pytest.raises(ReplicaDiedError):
            await reading


def with_session(prepare: Any) -> Any:
    async def prepared(*args: Any) -> Any:
        messages = await prepare(*args)
        messages[0].session_id = "realtime"
        return messages

    return prepared


async def test_of_several_choices_only_the_lost_ones_start_anew() -> None:
    async with pair() as stages:
        params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA)
        reading = stages.ask(params)
        await stages.reached(0)
        await stages.reached(1)
        stages.replicas[0].crash()
        await stages.reached(1, 2)
        for request, word in zip(stages.replicas[1].added, ("kept", "anew"), strict=True):
            stages.replicas[1].emit(text_output(request.request_id, word, finished=True))
        outputs = await reading
        assert [text_of(outputs, index) for index in range(2)] == ["anew", "kept"]
        assert stages.metrics.resubmitted == ["s0"]


async def test_a_request_that_is_aborted_while_it_starts_anew_ends() -> None:
    async with pair() as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.preparer.gate = asyncio.Event()
        stages.replicas[0].crash()
        await eventually(lambda: len(stages.preparer.prepared) == 2)
        await stages.omni.abort("mine")
        stages.preparer.gate.set()
        with pytest.raises(RequestFailedError, match="aborted"):
            await reading
        assert stages.replicas[1].added == []
        assert await stages.is_clean()


async def test_the_deadline_holds_for_both_attempts_together() -> None:
    async with pair() as stages:
        reading = stages.ask(deadline_s=0.3)
        await stages.reached(0)
        stages.replicas[0].crash()
        await stages.reached(1)
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0\.3 s"):
            await reading
        assert await stages.is_clean()


async def test_it_may_wait_for_the_replica_to_come_back() -> None:
    async with pair(1, "wait", max_restarts=3, restart_backoff_s=0.05) as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].script = says("back again")
        stages.replicas[0].crash()
        outputs = await reading
        assert text_of(outputs) == "back again"
        assert stages.metrics.resubmitted == ["s0"]
        assert await stages.is_clean()


async def test_it_does_not_wait_for_what_comes_after_its_deadline() -> None:
    async with pair(1, "wait", max_restarts=3, restart_backoff_s=30.0) as stages:
        reading = stages.ask(deadline_s=10.0)
        await stages.reached(0)
        stages.replicas[0].crash("killed")
        with pytest.raises(ReplicaDiedError, match="killed"):
            await reading


async def test_who_waits_is_told_when_the_stage_is_given_up() -> None:
    async with pair(1, "wait", max_restarts=3, restart_backoff_s=30.0) as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].crash()
        await eventually(lambda: bool(stages.metrics.resubmitted))
        orchestrator = stages.omni.engine._orchestrator
        assert orchestrator is not None
        await eventually(lambda: len(orchestrator.request_states) == 1)
        await stages.omni.supervise("drain", "s0", 0)
        with pytest.raises(StageUnavailableError, match="Stage-0 has no live replica"):
            await reading
        assert await stages.is_clean()


async def test_who_waits_may_leave() -> None:
    async with pair(1, "wait", max_restarts=3, restart_backoff_s=30.0) as stages:
        reading = stages.ask()
        await stages.reached(0)
        stages.replicas[0].crash()
        await eventually(lambda: bool(stages.metrics.resubmitted))
        reading.cancel()
        await asyncio.wait([reading])
        assert await stages.is_clean()
