"""A server of one stage that speaks, with real processes of the tone model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import FakePreparer, fake_config
from tests.generation.replicas import tone_spec
from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.engine.one_shot_client import OneShotClient
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.stage_client import StagePreparer
from vllm_omni.entrypoints.async_omni import AsyncOmni

PIPELINE = PipelineConfig(
    model_type="tone",
    stages=(StageConfig(name="voice", kind=StageKind.ONE_SHOT, emits=Modality.AUDIO),),
    edges=(),
    entries={Task.SPEECH: "voice"},
)


@dataclass(slots=True)
class ToneLauncher:
    """Starts tone replicas in processes of their own, and remembers what it started."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Of the replicas' specs; read at every start."""
    started: list[tuple[ReplicaSpec, OneShotClient]] = field(default_factory=list)

    def replica_specs(self, config: ResolvedConfig) -> list[ReplicaSpec]:
        return [
            tone_spec(stage_id=0, replica_id=i) for i in range(config.stages[0].deploy.num_replicas)
        ]

    async def start_replica(self, spec: ReplicaSpec) -> OneShotClient:
        changed = tone_spec(
            stage_id=0, replica_id=spec.replica_id, incarnation=spec.incarnation, **self.changes
        )
        client = await OneShotClient.start(changed)
        self.started.append((spec, client))
        return client

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
        return FakePreparer()


@asynccontextmanager
async def tone_server(
    launcher: ToneLauncher,
    *,
    num_replicas: int = 1,
    limits: ServerLimits | None = None,
    **deploy: Any,
) -> AsyncIterator[AsyncOmni]:
    """A started server; `deploy` are fields of `StageDeploy`."""
    config = fake_config(PIPELINE, [num_replicas], limits, deploy={"max_restarts": 3, **deploy})
    async with (
        asyncio.timeout(60),
        await AsyncOmni.create(config=config, launcher=launcher) as omni,
    ):
        yield omni
