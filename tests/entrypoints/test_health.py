"""What `errored`, `is_running` and `check_health` say, and of what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fakes import FakeLauncher, FakeStageClient, chain_pipeline, fake_config
from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.outputs.request_output import OmniRequestOutput


class FlaggedClient:
    """A client that carries a death flag nobody asks for, in either of its styles."""

    def __init__(self, **flags: object) -> None:
        self.__dict__.update(flags)

    def check_health(self) -> None:
        pass


class DeadClient:
    def check_health(self) -> None:
        raise EngineDeadError("worker was killed")


def base(pools: list[list[Any]] | None = None, *, alive: bool = True) -> OmniBase:
    """An OmniBase over an engine of these slots."""
    config = fake_config(chain_pipeline(1))
    omni = OmniBase(config, launcher=FakeLauncher([[FakeStageClient()]]))
    engine: Any = SimpleNamespace(is_alive=lambda: alive)
    if pools is not None:
        engine.stage_pools = [
            StagePool(i, f"s{i}", StageKind.AUTOREGRESSIVE, slots) for i, slots in enumerate(pools)
        ]
    omni.engine = engine
    return omni


LIVE = FakeStageClient()


@pytest.mark.parametrize(
    "pools",
    [
        [[LIVE], [LIVE]],
        [[LIVE], [DeadClient()]],
        [[LIVE], [DeadClient(), LIVE]],
        [[None], [None, None]],
    ],
    ids=["alive", "a stage is dead", "a replica survives", "all slots are evicted"],
)
def test_errored_asks_for_the_orchestrator_and_nothing_else(pools: list[list[Any]]) -> None:
    omni = base(pools)
    assert not omni.errored
    assert omni.is_running


def test_errored_when_the_orchestrator_is_dead() -> None:
    omni = base([[LIVE]], alive=False)
    assert omni.errored
    assert not omni.is_running


@pytest.mark.parametrize(
    "client",
    [
        FlaggedClient(_engine_dead=True),
        FlaggedClient(resources=SimpleNamespace(engine_dead=True)),
    ],
)
def test_running_in_spite_of_a_dead_stage(client: FlaggedClient) -> None:
    omni = base([[LIVE], [client]])
    assert omni.is_running
    assert not omni.errored


@pytest.mark.parametrize(
    "pools",
    [[[LIVE], [LIVE]], [[LIVE], [None, LIVE]], [[LIVE], [DeadClient(), LIVE]], [[LIVE], []], None],
    ids=["healthy", "hole and survivor", "dead and survivor", "empty pool", "no pools"],
)
def test_health_passes(pools: list[list[Any]] | None) -> None:
    base(pools).check_health()


@pytest.mark.parametrize(
    "slots", [[DeadClient()], [None], [None, DeadClient()], [object()]], ids=repr
)
def test_health_names_the_stage_without_a_live_replica(slots: list[Any]) -> None:
    with pytest.raises(EngineDeadError, match="Stage-1 has no live replica"):
        base([[LIVE], slots]).check_health()


def test_health_of_a_dead_orchestrator() -> None:
    with pytest.raises(EngineDeadError, match="Orchestrator process is not alive"):
        base([[LIVE]], alive=False).check_health()


def test_other_errors_of_a_health_check_propagate() -> None:
    class Broken:
        def check_health(self) -> None:
            raise OSError("no such process")

    with pytest.raises(OSError, match="no such process"):
        base([[Broken()]]).check_health()


def test_dead_stages_are_named() -> None:
    assert base([[LIVE], [None]]).dead_stages() == ["s1"]
    assert OmniRequestOutput(request_id="x").text == ""
