"""A rank, or the replica, dies: who loses what, what comes back, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.diffusion.conftest import one_thread
from tests.diffusion.replicas import pid_of, stripe_spec
from tests.fakes import fake_config
from tests.processes import Family, descendants
from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.diffusion.models.wan_video import capabilities
from vllm_omni.diffusion.models.wan_video.tiny import make_tiny
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.stage_client import StagePreparer
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import ReplicaDiedError, StageUnavailableError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.outputs.request_output import OmniRequestOutput

__all__ = ["one_thread"]

WAN: Final = "vllm_omni.diffusion.models.wan_video"
PIPELINE: Final = PipelineConfig(
    model_type="wan",
    stages=(
        StageConfig(
            name="dit",
            kind=StageKind.DIFFUSION,
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.VIDEO,
        ),
    ),
    entries={Task.VIDEO: "dit"},
)


class WanLauncher:
    """Starts replicas of two ranks, and remembers them."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.started: list[DiffusionClient] = []

    def replica_specs(self, config: ResolvedConfig) -> list[ReplicaSpec]:
        return [
            stripe_spec(
                model_dir=self.model_dir,
                model_class=f"{WAN}.diffusion_pipeline:WanTextToVideo",
                capabilities=f"{WAN}.capabilities:text_to_video",
                devices=("cpu", "cpu"),
                num_threads=2,
            )
        ]

    async def start_replica(self, spec: ReplicaSpec) -> DiffusionClient:
        client = await DiffusionClient.start(spec)
        self.started.append(client)
        return client

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
        return DiffusionPreparer(stage.config.name, capabilities.text_to_video(self.model_dir))


@asynccontextmanager
async def server(launcher: WanLauncher) -> AsyncIterator[AsyncOmni]:
    config = fake_config(PIPELINE, deploy={"max_restarts": 3})
    async with (
        asyncio.timeout(150),
        await AsyncOmni.create(config=config, launcher=launcher) as omni,
    ):
        yield omni


def params(**fields: Any) -> OmniDiffusionSamplingParams:
    values = {"seed": 1, "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3}
    return OmniDiffusionSamplingParams(**{**values, **fields})


async def video(omni: AsyncOmni) -> OmniRequestOutput:
    last = None
    async for output in omni.generate("waves", params()):
        last = output
    assert last is not None
    return last


async def when_it_is_back(omni: AsyncOmni) -> OmniRequestOutput:
    while True:
        try:
            return await video(omni)
        except StageUnavailableError:
            await asyncio.sleep(0.2)


async def lost_while_denoising(omni: AsyncOmni, victim: int) -> tuple[str, float]:
    """The error of a request whose process was killed in the middle, and after how long."""
    stream = omni.generate("waves", params(num_inference_steps=900))
    async with aclosing(stream):
        for _ in range(3):
            await anext(stream)
        os.kill(victim, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(ReplicaDiedError) as caught:
            async for _ in stream:
                pass
    return str(caught.value), time.monotonic() - began_s


async def test_a_rank_dies_then_the_replica_and_each_takes_all_with_it(tmp_path: Path) -> None:
    launcher = WanLauncher(make_tiny(tmp_path, seed=1, variant="t2v_2_2"))
    async with server(launcher) as omni:
        before = await video(omni)
        [first] = launcher.started
        ranks = sorted(descendants(pid_of(first)))
        family = Family(pid_of(first))
        message, took_s = await lost_while_denoising(omni, ranks[1])
        left = family.alive_after(5.0)
        family.close()
        again = await when_it_is_back(omni)

        second = launcher.started[-1]
        others = Family(pid_of(second))
        killed, _ = await lost_while_denoising(omni, pid_of(second))
        orphans = others.alive_after(5.0)
        others.close()

    assert "rank 1 was killed by SIGKILL" in message
    assert took_s < 5
    assert left == []
    assert second is not first
    assert before.video is not None
    assert again.video is not None
    assert np.array_equal(before.video.array(), again.video.array())
    assert "SIGKILL" in killed
    assert orphans == []
