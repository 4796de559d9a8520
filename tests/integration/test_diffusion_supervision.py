"""Diffusion replicas under supervision: who loses what when one dies, and what comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.diffusion.bench import request
from tests.diffusion.replicas import pid_of, stripe_spec
from tests.diffusion.stripes import CAPABILITIES, drawn
from tests.fakes import fake_config
from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.stage_client import StagePreparer
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import BadRequestError, ReplicaDiedError, StageUnavailableError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.outputs.request_output import OmniRequestOutput

PIPELINE = PipelineConfig(
    model_type="stripes",
    stages=(
        StageConfig(
            name="dit",
            kind=StageKind.DIFFUSION,
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.IMAGE,
        ),
    ),
    entries={Task.IMAGE: "dit"},
)
LONG = 400
"""Steps of a request that is still at work when its replica dies."""


@dataclass(slots=True)
class StripeLauncher:
    """Starts replicas in processes of their own, and remembers them."""

    started: list[DiffusionClient] = field(default_factory=list)

    def replica_specs(self, config: ResolvedConfig) -> list[ReplicaSpec]:
        return [stripe_spec(replica_id=i) for i in range(config.stages[0].deploy.num_replicas)]

    async def start_replica(self, spec: ReplicaSpec) -> DiffusionClient:
        client = await DiffusionClient.start(spec)
        self.started.append(client)
        return client

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
        return DiffusionPreparer(stage.config.name, CAPABILITIES)


@asynccontextmanager
async def server(launcher: StripeLauncher, num_replicas: int) -> AsyncIterator[AsyncOmni]:
    config = fake_config(PIPELINE, [num_replicas], deploy={"max_restarts": 3})
    async with (
        asyncio.timeout(110),
        await AsyncOmni.create(config=config, launcher=launcher) as omni,
    ):
        yield omni


def params(**fields: Any) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(**{"seed": 1, **fields})


async def draw(omni: AsyncOmni, prompt: str, **fields: Any) -> OmniRequestOutput:
    """The last output, which has the picture."""
    last = None
    async for output in omni.generate(prompt, params(**fields)):
        last = output
    assert last is not None
    return last


def assert_drawn(output: OmniRequestOutput, prompt: str, **fields: Any) -> None:
    expected = drawn(request("r", prompt, **{"seed": 1, **fields}))
    assert np.array_equal(np.asarray(output.images[0]), expected)


async def test_the_only_replica_dies_while_denoising_and_comes_back() -> None:
    launcher = StripeLauncher()
    async with server(launcher, 1) as omni:
        stream = omni.generate("a cat", params(num_inference_steps=LONG))
        async with aclosing(stream):
            steps = [(await anext(stream)).progress for _ in range(3)]
            os.kill(pid_of(launcher.started[0]), signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(ReplicaDiedError, match="SIGKILL"):
                await _drained(stream)
            took_s = time.monotonic() - began_s
        again = await _when_it_is_back(omni)

    assert all(progress is not None and progress.num_steps == LONG for progress in steps)
    assert took_s < 5
    assert_drawn(again, "a dog")


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def _when_it_is_back(omni: AsyncOmni) -> OmniRequestOutput:
    while True:
        try:
            return await draw(omni, "a dog")
        except StageUnavailableError:
            await asyncio.sleep(0.1)


async def test_one_of_two_dies_and_nobody_notices() -> None:
    """The other replica's requests go on; what was lost had not reached the client: once more."""
    launcher = StripeLauncher()
    async with server(launcher, 2) as omni:
        tasks = {
            prompt: asyncio.create_task(draw(omni, prompt, num_inference_steps=LONG))
            for prompt in ("a", "b", "c", "d")
        }
        await asyncio.sleep(0.2)
        os.kill(pid_of(launcher.started[0]), signal.SIGKILL)
        outputs = {prompt: await task for prompt, task in tasks.items()}

    for prompt, output in outputs.items():
        assert_drawn(output, prompt, num_inference_steps=LONG)
    attempts = sorted(output.timings["dit"].attempt for output in outputs.values())
    assert attempts == [1, 1, 2, 2]


async def _figures(client: DiffusionClient) -> object:
    """Asked in the client's own loop."""
    call = client.call_utility_async("figures")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, client._loop))


async def test_progress_several_pictures_leaving_and_refusals() -> None:
    launcher = StripeLauncher()
    async with server(launcher, 1) as omni:
        outputs = [one async for one in omni.generate("a", params(num_outputs_per_prompt=3))]
        stream = omni.generate("left", params(num_inference_steps=1000))
        async with aclosing(stream):
            first = await anext(stream)
        after = await draw(omni, "next")
        figures = await _figures(launcher.started[0])
        with pytest.raises(BadRequestError) as caught:
            await draw(omni, "a", height=40, width=32)

    pictures = {one.index: np.asarray(one.images[0]) for one in outputs if one.images}
    assert {i: picture.tolist() for i, picture in pictures.items()} == {
        i: drawn(request("r", "a", seed=1 + i)).tolist() for i in range(3)
    }
    assert first.progress is not None
    assert (first.progress.step < 1000, first.progress.num_steps) == (True, 1000)
    assert_drawn(after, "next")
    assert isinstance(figures, dict)
    assert figures["num_requests"] == figures["num_states"] == 0
    assert caught.value.field == "height"
