"""Diffusion replicas without a model in processes of their own, and what a test asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt


def stripe_spec(**changes: object) -> ReplicaSpec:
    values: dict[str, object] = {
        "stage": "dit",
        "stage_id": 0,
        "replica_id": 0,
        "kind": StageKind.DIFFUSION,
        "model_dir": Path("/"),
        "model_class": "tests.diffusion.stripes:SlowStripePipeline",
        "capabilities": "tests.diffusion.stripes:capabilities",
        "devices": ("cpu",),
        "num_threads": 1,
        "max_batch_size": 4,
        "start_timeout_s": 60.0,
        **changes,
    }
    return ReplicaSpec(**values)  # type: ignore[arg-type]


def draw(request_id: str, prompt: str | None = None, **fields: Any) -> StageRequest:
    """What the orchestrator gives a client."""
    deadline_s = fields.pop("deadline_s", None)
    params = OmniDiffusionSamplingParams(**{"seed": 0, **fields})
    text = OmniPrompt(text=prompt or request_id)
    return StageRequest(request_id, 0, text, params, deadline_s=deadline_s)


class Listener:
    """Reads a client's outputs as the orchestrator does."""

    def __init__(self, client: DiffusionClient) -> None:
        self.client = client
        self.steps: dict[str, list[int]] = {}
        self.ended: dict[str, StageOutput] = {}

    async def until_ended(self, *request_ids: str) -> None:
        async with asyncio.timeout(30):
            while not self.ended.keys() >= set(request_ids):
                await self.next()

    async def until_step(self, request_id: str, step: int) -> None:
        async with asyncio.timeout(30):
            while step not in self.steps.get(request_id, ()):
                await self.next()

    async def next(self) -> None:
        for output in await self.client.get_outputs_async():
            if output.progress is not None:
                self.steps.setdefault(output.request_id, []).append(output.progress.step)
            if output.finished:
                self.ended[output.request_id] = output


@asynccontextmanager
async def running(**changes: object) -> AsyncIterator[DiffusionClient]:
    client = await DiffusionClient.start(stripe_spec(**changes))
    try:
        yield client
    finally:
        await client.shutdown_async(5.0)


def pid_of(client: DiffusionClient) -> int:
    assert client._process is not None
    return client._process.pid
