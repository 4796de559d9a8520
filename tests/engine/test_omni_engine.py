"""The orchestrator's thread: how it starts its replicas and how it ends."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence

import pytest

from tests.fakes import FakeLauncher, FakeStageClient, chain_pipeline, eventually, fake_config
from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.engine.omni_engine import OmniEngine, load_bridges
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import ConfigError, EngineStoppedError, StageStartError


def engine_of(
    config: ResolvedConfig, launcher: FakeLauncher
) -> tuple[OmniEngine, Sequence[Sequence[FakeStageClient]]]:
    return OmniEngine(config, launcher.replica_specs(config), launcher.start_replica), (
        launcher.clients
    )


def clients_for(*num_replicas: int) -> list[list[FakeStageClient]]:
    return [[FakeStageClient() for _ in range(n)] for n in num_replicas]


class Starts:
    """Counts how many replicas start at once, and lets them finish together."""

    def __init__(self, num_expected: int) -> None:
        self.running: list[str] = []
        self.most = 0
        self.ignored = ""
        """A stage that is not counted."""
        self._num_expected = num_expected
        self._all = asyncio.Event()

    async def __call__(self, spec: ReplicaSpec) -> None:
        if spec.stage == self.ignored:
            return
        self.running.append(spec.name)
        self.most = max(self.most, len(self.running))
        if len(self.running) == self._num_expected:
            self._all.set()
        if self._num_expected > 1:
            async with asyncio.timeout(5):
                await self._all.wait()
        else:
            await asyncio.sleep(0)
        self.running.remove(spec.name)


def test_stages_start_side_by_side() -> None:
    config = fake_config(chain_pipeline(3))
    starts = Starts(num_expected=3)
    engine, _ = engine_of(config, FakeLauncher(clients_for(1, 1, 1), on_start=starts))
    engine.start().result(timeout=10)
    assert starts.most == 3
    assert [pool.live_replica_ids() for pool in engine.stage_pools] == [[0], [0], [0]]
    engine.shutdown()


def test_a_program_that_ends_without_shutdown_stops_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    config = fake_config(chain_pipeline(2))
    engine, clients = engine_of(config, FakeLauncher(clients_for(1, 1)))
    engine.start().result(timeout=10)
    (end,) = at_exit

    end()

    assert not engine.is_alive()
    assert [client.shutdown_calls for (client,) in clients] == [1, 1]
    assert engine.supervisor.statuses()[0].last_error is None
    assert at_exit == []
    end()


def test_replicas_that_measure_an_accelerator_start_one_after_another() -> None:
    devices = {"s0": ("cuda:0", "cuda:0"), "s1": ("cuda:0",), "s2": ("cuda:1",)}
    config = fake_config(chain_pipeline(3), [2, 1, 1], devices=devices)
    starts = Starts(num_expected=1)
    starts.ignored = "s2"  # a one-shot stage, and elsewhere
    engine, _ = engine_of(config, FakeLauncher(clients_for(2, 1, 1), on_start=starts))
    engine.start().result(timeout=10)
    assert starts.most == 1
    engine.shutdown()


def test_replicas_that_know_their_memory_share_an_accelerator_at_once() -> None:
    devices = {"s0": ("cuda:0",), "s1": ("cuda:0",), "s2": ("cuda:0",)}
    known = {"engine_args": {"kv_cache_memory_bytes": 1 << 30}}
    config = fake_config(chain_pipeline(3), devices=devices, deploy=known)
    starts = Starts(num_expected=3)
    engine, _ = engine_of(config, FakeLauncher(clients_for(1, 1, 1), on_start=starts))
    engine.start().result(timeout=10)
    assert starts.most == 3
    engine.shutdown()


def test_replicas_on_different_accelerators_start_at_once() -> None:
    config = fake_config(chain_pipeline(1), [2], devices={"s0": ("cuda:0", "cuda:1")})
    starts = Starts(num_expected=2)
    engine, _ = engine_of(config, FakeLauncher(clients_for(2), on_start=starts))
    engine.start().result(timeout=10)
    assert starts.most == 2
    engine.shutdown()


def test_a_replica_that_fails_to_start_stops_the_others() -> None:
    config = fake_config(chain_pipeline(2))
    launcher = FakeLauncher(
        clients_for(1, 1), start_errors={"s1/0": StageStartError("stage s1: no weights")}
    )
    engine, clients = engine_of(config, launcher)
    with pytest.raises(StageStartError, match="stage s1: no weights"):
        engine.start().result(timeout=10)
    engine.shutdown()
    assert not engine.is_alive()
    assert clients[0][0].shutdown_calls == 1


def test_stopping_while_it_starts_cancels_the_start() -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def never_ready(spec: ReplicaSpec) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    config = fake_config(chain_pipeline(1))
    engine, _ = engine_of(config, FakeLauncher(clients_for(1), on_start=never_ready))
    ready = engine.start()
    assert began.wait(5)
    engine.shutdown()
    with pytest.raises(EngineStoppedError, match="stopped while it started"):
        ready.result(timeout=5)
    assert cancelled.is_set()
    assert not engine.is_alive()


def test_replicas_start_in_the_thread_that_lives_as_long_as_they_do() -> None:
    threads: list[str] = []

    async def note(spec: ReplicaSpec) -> None:
        threads.append(threading.current_thread().name)

    config = fake_config(chain_pipeline(1))
    engine, _ = engine_of(config, FakeLauncher(clients_for(1), on_start=note))
    engine.start().result(timeout=10)
    assert threads == ["omni-orchestrator"]
    assert engine.is_alive()
    engine.shutdown()


def test_shutdown_can_be_repeated_and_closes_the_queues() -> None:
    config = fake_config(chain_pipeline(1))
    engine, clients = engine_of(config, FakeLauncher(clients_for(1)))
    engine.shutdown()
    engine.start().exception(timeout=5)
    engine.shutdown()
    engine, clients = engine_of(config, FakeLauncher(clients_for(1)))
    engine.start().result(timeout=5)
    engine.shutdown()
    engine.shutdown()
    assert clients[0][0].shutdown_calls == 1
    with pytest.raises(EngineStoppedError):
        engine.outbox.take()


async def test_figures_of_every_slot() -> None:
    config = fake_config(chain_pipeline(1), [2])
    engine, clients = engine_of(config, FakeLauncher(clients_for(2)))
    await asyncio.wrap_future(engine.start())
    clients[0][1].crash()
    await eventually(lambda: engine.stage_pools[0].live_num_replicas == 1)
    assert [(one.stage, one.replica, one.is_live) for one in engine.replica_figures()] == [
        ("s0", 0, True),
        ("s0", 1, False),
    ]
    engine.shutdown()


def test_internal_ids_never_repeat() -> None:
    config = fake_config(chain_pipeline(1))
    engine, _ = engine_of(config, FakeLauncher(clients_for(1)))
    assert len({engine.internal_id("same") for _ in range(100)}) == 100


@pytest.mark.parametrize("bridge", ["no.such.module:name", "tests.fakes:no_such_name"])
def test_a_bridge_that_cannot_be_loaded_stops_the_start(bridge: str) -> None:
    with pytest.raises(ConfigError, match="cannot load the bridge") as raised:
        load_bridges(chain_pipeline(2, bridge))
    assert bridge in str(raised.value)
