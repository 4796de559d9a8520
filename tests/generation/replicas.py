"""One-shot replicas with the tone model in processes of their own, and what a test asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.messages import StageOutput, StageRequest, StreamSource
from vllm_omni.engine.one_shot_client import OneShotClient
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams

BRIDGE = "tests.generation.tone:WordBridge"


def tone_spec(**changes: object) -> ReplicaSpec:
    values: dict[str, object] = {
        "stage": "voice",
        "stage_id": 2,
        "replica_id": 0,
        "kind": StageKind.ONE_SHOT,
        "model_dir": Path("/"),
        "model_class": "tests.generation.tone:ToneModel",
        "devices": ("cpu",),
        "num_threads": 1,
        "max_batch_size": 4,
        "start_timeout_s": 30.0,
        "has_sources": True,
        **changes,
    }
    return ReplicaSpec(**values)  # type: ignore[arg-type]


class Listener:
    """Reads a client's outputs as the orchestrator does."""

    def __init__(self, client: OneShotClient) -> None:
        self.client = client
        self.pcm: dict[str, bytes] = {}
        self.ended: dict[str, StageOutput] = {}

    async def until_ended(self, *request_ids: str) -> None:
        async with asyncio.timeout(20):
            while not self.ended.keys() >= set(request_ids):
                await self.next()

    async def next(self) -> list[str]:
        """Take the next outputs; the ids of their requests."""
        outputs = await self.client.get_outputs_async()
        for output in outputs:
            if output.audio is not None:
                pcm = self.pcm.get(output.request_id, b"")
                self.pcm[output.request_id] = pcm + output.audio.pcm
            if output.finished:
                self.ended[output.request_id] = output
        return [output.request_id for output in outputs]


def say(request_id: str, text: str, **more: float) -> StageRequest:
    return StageRequest(request_id, 2, OmniPrompt(text=text), SpeechParams(), **more)


def listen(request_id: str, stream: str) -> StageRequest:
    source = StreamSource(stream, "thinker", BRIDGE)
    return StageRequest(request_id, 2, None, SpeechParams(), sources=(source,))


@asynccontextmanager
async def running(**changes: object) -> AsyncIterator[OneShotClient]:
    client = await OneShotClient.start(tone_spec(**changes))
    try:
        yield client
    finally:
        await client.shutdown_async(5.0)


def pid_of(client: OneShotClient) -> int:
    assert client._process is not None
    return client._process.pid
