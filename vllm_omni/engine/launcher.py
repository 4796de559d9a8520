"""How the engine gets its replicas and preparers: the seam that tests put fakes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.stage_client import StageClient, StagePreparer


class StageLauncher(Protocol):
    """Makes everything that a resolved config asks for."""

    def replica_specs(self, config: ResolvedConfig) -> Sequence[ReplicaSpec]:
        """One spec for every replica of every stage."""

    async def start_replica(self, spec: ReplicaSpec) -> StageClient:
        """Start one replica; returns when a real request went through it."""

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
        """The API's side of a stage. May take seconds; called in a thread of its own."""


class FactoryLauncher:
    """The real thing: `stage_factory.py`, imported when the first stage is made."""

    def replica_specs(self, config: ResolvedConfig) -> Sequence[ReplicaSpec]:
        from vllm_omni.engine import stage_factory

        if any(stage.config.kind is StageKind.AUTOREGRESSIVE for stage in config.stages):
            _import_vllm()
        return stage_factory.replica_specs(config)

    async def start_replica(self, spec: ReplicaSpec) -> StageClient:
        from vllm_omni.engine import stage_factory

        return await stage_factory.start_replica(spec)

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
        from vllm_omni.engine import stage_factory

        return stage_factory.make_preparer(stage, config)


def _import_vllm() -> None:
    """Import what replicas and preparers need, in one thread.

    Modules of vLLM import each other in a circle: two threads that enter it at different places
    see halves of them.
    """
    import vllm_omni.engine.ar_launch
    import vllm_omni.engine.ar_preparer  # noqa: F401
