"""The supervisor over fake replicas: what it starts, when, and what operators may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.engine.rig import Rig, running
from tests.fakes import (
    FakeLauncher,
    FakeStageClient,
    chain_pipeline,
    fake_config,
    settle,
    text_output,
)
from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.engine.process_status import Heartbeat
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.restart import RestartPolicy
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.supervisor import Supervisor
from vllm_omni.errors import ReplicaStateError, StageStartError, UnknownReplicaError


class Time:
    """A clock, and a sleep that ends when the test moves it on."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, future))
        await future

    async def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for until_s, future in self._sleepers:
            if until_s <= self.now_s and not future.done():
                future.set_result(None)
        self._sleepers = [one for one in self._sleepers if not one[1].done()]
        await settle()


def finished(request_id: str) -> StageOutput:
    return text_output(request_id, "done", finished=True)


class SeenMetrics(NullMetrics):
    def __init__(self) -> None:
        self.states: list[tuple[int, str]] = []
        self.restarts: list[int] = []
        self.start_times_s: list[float] = []

    def replica_state(self, stage: str, replica: int, state: str) -> None:
        self.states.append((replica, state))

    def replica_restarted(self, stage: str, replica: int) -> None:
        self.restarts.append(replica)

    def replica_started(self, stage: str, replica: int, seconds: float) -> None:
        self.start_times_s.append(seconds)


class Supervised:
    """One stage of fake replicas under a supervisor, and the time they live in."""

    def __init__(self, num_replicas: int, policy: RestartPolicy) -> None:
        pipeline = chain_pipeline(1)
        self.launcher = FakeLauncher([[FakeStageClient() for _ in range(num_replicas)]])
        self.rig = Rig([[None] * num_replicas], pipeline)
        self.time = Time()
        self.metrics = SeenMetrics()
        self.starts: list[str] = []
        self.start_error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.supervisor = Supervisor(
            self.launcher.replica_specs(fake_config(pipeline, [num_replicas])),
            self.rig.pools,
            self._start,
            [policy],
            self.metrics,
            clock=self.time.clock,
            sleep=self.time.sleep,
        )

    async def _start(self, spec: ReplicaSpec) -> StageClient:
        self.starts.append(spec.incarnation_name)
        if self.gate is not None:
            await self.gate.wait()
        if self.start_error is not None:
            raise self.start_error
        return await self.launcher.start_replica(spec)

    def __repr__(self) -> str:
        return repr(self.supervisor).removeprefix("<Supervisor ").removesuffix(">")

    async def crash(self, client: FakeStageClient, text: str = "killed") -> None:
        client.crash(text)
        await settle()

    @property
    def first(self) -> FakeStageClient:
        return self.launcher.clients[0][0]


@asynccontextmanager
async def supervised(
    num_replicas: int = 1, policy: RestartPolicy | None = None
) -> AsyncIterator[Supervised]:
    stages = Supervised(num_replicas, policy or RestartPolicy())
    await stages.supervisor.start_all()
    stages.rig.orchestrator.supervised_by(stages.supervisor)
    stages.supervisor.begin(stages.rig.orchestrator)
    async with running(stages.rig):
        yield stages


async def test_a_dead_replica_is_started_again_after_its_back_off() -> None:
    async with supervised() as stages:
        await stages.crash(stages.first, "CUDA out of memory")
        assert repr(stages) == "[s0/0 backoff]"
        await stages.time.pass_s(0.9)
        assert stages.starts == ["s0/0.1"]
        await stages.time.pass_s(0.1)
        assert stages.starts == ["s0/0.1", "s0/0.2"]
        assert repr(stages) == "[s0/0 ready]"
        assert stages.metrics.restarts == [0]
        assert [state for _, state in stages.metrics.states] == [
            "starting",
            "ready",
            "backoff",
            "starting",
            "ready",
        ]
        (status,) = stages.supervisor.statuses()
        assert (status.restarts, status.last_error) == (1, "CUDA out of memory")


async def test_how_long_a_start_took_is_told() -> None:
    async with supervised() as stages:
        stages.gate = asyncio.Event()
        await stages.crash(stages.first)
        await stages.time.pass_s(1.0)
        await stages.time.pass_s(7.5)
        stages.gate.set()
        await settle()
        assert stages.metrics.start_times_s == [0.0, 7.5]
        (status,) = stages.supervisor.statuses()
        assert status.start_took_s == 7.5


async def test_it_comes_back_to_its_slot_and_serves() -> None:
    async with supervised(2) as stages:
        await stages.crash(stages.first)
        await stages.rig.add("a", "b")
        assert stages.launcher.clients[0][1].added_ids == ["a", "b"]
        await stages.time.pass_s(1.0)
        assert stages.rig.pools[0].live_replica_ids() == [0, 1]
        await stages.rig.add("c")
        assert stages.launcher.restarted[0].added_ids == ["c"]


async def test_a_start_that_fails_counts_against_the_budget() -> None:
    async with supervised() as stages:
        stages.start_error = StageStartError("stage s0/0: no such device")
        await stages.crash(stages.first)
        for delay_s in (1.0, 2.0, 4.0):
            assert repr(stages) == "[s0/0 backoff]"
            (status,) = stages.supervisor.statuses()
            assert status.next_attempt_in_s == delay_s
            await stages.time.pass_s(delay_s)
        assert repr(stages) == "[s0/0 stopped]"
        assert len(stages.starts) == 4
        (status,) = stages.supervisor.statuses()
        assert status.last_error == "stage s0/0: no such device"
        assert status.next_attempt_in_s is None
        await stages.time.pass_s(10_000.0)
        assert len(stages.starts) == 4, "nothing brings it back but an operator"


async def test_whatever_a_restart_raises_is_the_replicas_own_misfortune() -> None:
    async with supervised(2) as stages:
        stages.start_error = OSError("too many open files")
        await stages.crash(stages.first)
        await stages.time.pass_s(1.0)
        assert repr(stages) == "[s0/0 backoff, s0/1 ready]"
        await stages.rig.add("a")
        assert stages.launcher.clients[0][1].added_ids == ["a"]


async def test_each_replica_has_a_budget_of_its_own() -> None:
    async with supervised(2, RestartPolicy(max_restarts=1)) as stages:
        first, second = stages.launcher.clients[0]
        await stages.crash(first)
        await stages.time.pass_s(1.0)
        await stages.crash(stages.launcher.restarted[0])
        assert repr(stages) == "[s0/0 stopped, s0/1 ready]"
        await stages.crash(second)
        assert repr(stages) == "[s0/0 stopped, s0/1 backoff]"


async def test_the_earlier_incarnation_is_gone_before_the_next_starts() -> None:
    async with supervised() as stages:
        closed = asyncio.Event()

        async def slow(timeout_s: float) -> None:
            await closed.wait()

        stages.first.shutdown_async = slow  # type: ignore[method-assign]
        await stages.crash(stages.first)
        await stages.time.pass_s(1.0)
        assert (stages.starts, repr(stages)) == (["s0/0.1"], "[s0/0 starting]")
        closed.set()
        await settle()
        assert (stages.starts[1:], repr(stages)) == (["s0/0.2"], "[s0/0 ready]")


async def test_a_start_under_way_is_cancelled_when_the_server_stops() -> None:
    async with supervised() as stages:
        stages.gate = asyncio.Event()
        await stages.crash(stages.first)
        await stages.time.pass_s(1.0)
        assert repr(stages) == "[s0/0 starting]"
    assert stages.launcher.restarted == []


async def test_a_drained_replica_finishes_what_it_has_and_stays_down() -> None:
    async with supervised(2) as stages:
        await stages.rig.add("a")
        stages.supervisor.drain("s0", 0)
        await settle()
        assert repr(stages) == "[s0/0 draining, s0/1 ready]"
        await stages.rig.add("b", "c")
        assert stages.launcher.clients[0][1].added_ids == ["b", "c"]
        stages.first.emit(finished("a"))
        await settle()
        assert stages.rig.known == {"b", "c"}
        assert repr(stages) == "[s0/0 stopped, s0/1 ready]"
        assert stages.first.shutdown_calls == 1
        assert await stages.rig.errors() == []
        await stages.time.pass_s(10_000.0)
        assert stages.starts == ["s0/0.1", "s0/1.1"]


async def test_an_idle_replica_is_drained_at_once() -> None:
    async with supervised() as stages:
        status = stages.supervisor.drain("s0", 0)
        assert status.state == "draining"
        await settle()
        assert repr(stages) == "[s0/0 stopped]"


async def test_a_restart_of_a_replica_that_serves_drains_it_first() -> None:
    async with supervised(2) as stages:
        await stages.rig.add("a")
        stages.supervisor.restart("s0", 0)
        await settle()
        assert repr(stages) == "[s0/0 draining, s0/1 ready]"
        stages.first.emit(finished("a"))
        await settle()
        assert repr(stages) == "[s0/0 ready, s0/1 ready]"
        assert stages.starts[-1] == "s0/0.2"
        assert await stages.rig.errors() == []


async def test_a_restart_does_not_wait_longer_than_its_limit() -> None:
    async with supervised(1, RestartPolicy(drain_timeout_s=0.01)) as stages:
        await stages.rig.add("a")
        stages.supervisor.restart("s0", 0)
        (error,) = await stages.rig.next_errors()
        assert (error.request_id, error.code) == ("a", "replica_died")
        assert error.error == "stage s0/0 is restarted by an operator"
        await settle()
        assert repr(stages) == "[s0/0 ready]"


async def test_a_restart_brings_back_what_was_given_up_with_a_fresh_budget() -> None:
    async with supervised(1, RestartPolicy(max_restarts=0)) as stages:
        await stages.crash(stages.first)
        assert repr(stages) == "[s0/0 stopped]"
        assert stages.supervisor.restart("s0", 0).state == "starting"
        await settle()
        assert repr(stages) == "[s0/0 ready]"


async def test_a_restart_does_not_wait_for_the_back_off() -> None:
    async with supervised() as stages:
        await stages.crash(stages.first)
        stages.supervisor.restart("s0", 0)
        await settle()
        assert repr(stages) == "[s0/0 ready]"
        await stages.time.pass_s(100.0)
        assert stages.starts == ["s0/0.1", "s0/0.2"], "the first attempt was called off"


async def test_a_restart_that_fails_is_tried_again_within_the_budget() -> None:
    async with supervised(1, RestartPolicy(max_restarts=1)) as stages:
        stages.start_error = StageStartError("no weights")
        await stages.crash(stages.first)
        stages.supervisor.restart("s0", 0)
        await settle()
        assert repr(stages) == "[s0/0 backoff]"
        stages.start_error = None
        await stages.time.pass_s(1.0)
        assert repr(stages) == "[s0/0 ready]"


async def test_a_drain_calls_off_the_next_attempt() -> None:
    async with supervised() as stages:
        await stages.crash(stages.first)
        stages.supervisor.drain("s0", 0)
        await stages.time.pass_s(100.0)
        assert (stages.starts, repr(stages)) == (["s0/0.1"], "[s0/0 stopped]")


@pytest.mark.parametrize("follows", ["drain", "restart"])
async def test_a_replica_that_dies_while_it_is_drained(follows: str) -> None:
    async with supervised() as stages:
        await stages.rig.add("a")
        getattr(stages.supervisor, follows)("s0", 0)
        await settle()
        await stages.crash(stages.first)
        assert [error.request_id for error in await stages.rig.errors()] == ["a"]
        assert repr(stages) == {"drain": "[s0/0 stopped]", "restart": "[s0/0 ready]"}[follows]


async def test_what_an_operator_may_not_do() -> None:
    async with supervised() as stages:
        restart, drain = stages.supervisor.restart, stages.supervisor.drain
        for action in (restart, drain):
            for stage, replica_id in (("s1", 0), ("s0", 1), ("s0", -1)):
                with pytest.raises(UnknownReplicaError, match=f"no replica {stage}/{replica_id}"):
                    action(stage, replica_id)
        await stages.rig.add("a")
        drain("s0", 0)
        await refused(restart, "draining")
        await refused(drain, "draining")
        stages.first.emit(finished("a"))
        await settle()
        await refused(drain, "stopped")
        stages.gate = asyncio.Event()
        restart("s0", 0)
        await refused(restart, "starting")
        await refused(drain, "starting")


async def refused(action: Callable[[str, int], object], state: str) -> None:
    with pytest.raises(ReplicaStateError, match=f"stage s0/0 is {state}"):
        action("s0", 0)


async def test_whether_a_stage_is_expected_back() -> None:
    async with supervised() as stages:
        expects = stages.supervisor.expects
        assert expects(0, stages.time.now_s + 0.1)
        await stages.crash(stages.first)
        assert not expects(0, stages.time.now_s + 0.9)
        assert expects(0, stages.time.now_s + 1.1)
        stages.supervisor.drain("s0", 0)
        assert not expects(0, float("inf"))


async def test_a_replica_that_stands_still_is_dead_and_comes_back() -> None:
    async with supervised(2) as stages:
        await stages.rig.add("a", "b")
        stages.first.beat = Heartbeat(stages.time.now_s + 1, 7, 1)
        for _ in range(12):
            assert await stages.rig.errors() == []
            await stages.time.pass_s(5.0)
            stages.first.beat = Heartbeat(stages.time.now_s, 7, 1)
        for _ in range(4):
            await stages.time.pass_s(5.0)
            stages.first.beat = Heartbeat(stages.time.now_s, 7, 1)
        (error,) = await stages.rig.errors()
        assert error.request_id == "a"
        assert "s0/0 made no progress for" in error.error
        assert stages.first.shutdown_calls == 1
        assert repr(stages) in ("[s0/0 backoff, s0/1 ready]", "[s0/0 ready, s0/1 ready]")
        await stages.time.pass_s(1.0)
        assert repr(stages) == "[s0/0 ready, s0/1 ready]"


async def test_nobody_looks_when_it_is_switched_off() -> None:
    async with supervised(1, RestartPolicy(stall_timeout_s=0.0)) as stages:
        stages.first.beat = None
        for _ in range(100):
            await stages.time.pass_s(100.0)
        assert repr(stages) == "[s0/0 ready]"


async def test_requests_of_the_dead_incarnation_do_not_reach_its_successor() -> None:
    async with supervised() as stages:
        await stages.rig.add("a")
        await stages.crash(stages.first)
        await stages.time.pass_s(1.0)
        (successor,) = stages.launcher.restarted
        assert (successor.added, successor.abort_calls) == ([], [])
        stages.first.emit(finished("a"))
        await settle()
        assert [type(item).__name__ for item in await stages.rig.drain()] == ["ErrorMessage"]
