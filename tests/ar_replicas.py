"""Helpers for tests that run a real autoregressive replica on a tiny random model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.ar_client import ArClient
from vllm_omni.engine.ar_launch import start_ar_replica
from vllm_omni.engine.messages import StageOutput, StageRequest, StreamSource, StreamTarget
from vllm_omni.engine.replica_spec import ReplicaSpec

DEVICE = os.environ.get("VLLM_OMNI_TEST_DEVICE", "cpu")
"""Where replicas compute: "cuda:0" shows that a GPU's workers do what those of a CPU do."""

ENGINE_ARGS = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}


def spec_of(model_dir: Path, **changes: object) -> ReplicaSpec:
    """A replica of one thread."""
    fields: dict[str, object] = {
        "stage": "thinker",
        "stage_id": 0,
        "replica_id": 0,
        "kind": StageKind.AUTOREGRESSIVE,
        "model_dir": model_dir,
        "model_class": None,
        "devices": (DEVICE,),
        "num_threads": 1,
        "max_batch_size": 8,
        "start_timeout_s": 60.0,
        "engine_args": ENGINE_ARGS,
        "has_targets": True,
    }
    return ReplicaSpec(**{**fields, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def replica(model_dir: Path, **changes: object) -> AsyncIterator[Requests]:
    spec = spec_of(model_dir, **changes)
    client = await start_ar_replica(spec)
    try:
        async with running(client, spec) as requests:
            yield requests
    finally:
        await client.shutdown_async(10.0)


@asynccontextmanager
async def running(client: ArClient, spec: ReplicaSpec) -> AsyncIterator[Requests]:
    """Read the client's outputs until the block ends."""
    requests = Requests(client, spec)
    reader = asyncio.create_task(requests.read())
    try:
        yield requests
    finally:
        reader.cancel()
        await asyncio.wait({reader})


class Requests:
    """Submits requests to one client and sorts what comes back, as the orchestrator does."""

    def __init__(self, client: ArClient, spec: ReplicaSpec) -> None:
        self.client = client
        self.spec = spec
        self.death: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._queues: dict[str, asyncio.Queue[StageOutput]] = {}

    async def read(self) -> None:
        """Run until the client raises; the error stays in `death`, and `next` raises it."""
        try:
            while True:
                for output in await self.client.get_outputs_async():
                    self._queues[output.request_id].put_nowait(output)
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self.death.set_result(error)

    async def load(self, model_dir: Path) -> None:
        """Take the weights of another checkpoint of the same shape; nothing may be running."""
        call = self.client.call_utility_async
        path = {"weights_path": str(model_dir)}
        await call("collective_rpc", "reload_weights", None, (), path)
        for state in ("prefix_cache", "mm_cache", "encoder_cache"):
            await call(f"reset_{state}")

    async def submit(
        self,
        request_id: str,
        prompt: object,
        params: SamplingParams,
        targets: Sequence[StreamTarget] = (),
        deadline_s: float | None = None,
        sources: Sequence[StreamSource] = (),
    ) -> None:
        self._queues[request_id] = asyncio.Queue()
        await self.client.add_request_async(
            StageRequest(
                request_id, 0, prompt, params, tuple(sources), tuple(targets), deadline_s=deadline_s
            )
        )

    async def next(self, request_id: str) -> StageOutput:
        output = asyncio.ensure_future(self._queues[request_id].get())
        await asyncio.wait({output, self.death}, timeout=30, return_when="FIRST_COMPLETED")
        if not output.done():
            output.cancel()
            raise self.death.result() if self.death.done() else TimeoutError(request_id)
        return output.result()

    def num_unread(self, request_id: str) -> int:
        return self._queues[request_id].qsize()

    async def all(self, request_id: str) -> list[StageOutput]:
        outputs = [await self.next(request_id)]
        while not outputs[-1].finished:
            outputs.append(await self.next(request_id))
        return outputs

    async def run(self, request_id: str, prompt: object, params: SamplingParams) -> RequestOutput:
        """The final output of a request."""
        await self.submit(request_id, prompt, params)
        last = (await self.all(request_id))[-1]
        assert last.failure is None, last.failure
        return last.text


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    fields: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**{**fields, **changes})  # type: ignore[arg-type]
