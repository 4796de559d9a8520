"""A talker's replica between a thinker and a vocoder that tests play."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams

from tests.ar_replicas import Requests, greedy, replica
from tests.parity.speech_ends import Heard
from vllm_omni.core.token_streams import encode_tokens
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.messages import StreamSource

FAMILY = "vllm_omni.model_executor.models.qwen3_omni"
BRIDGE = f"{FAMILY}.bridges:TalkerConditioning"
ENGINE_ARGS: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,
}


class Thinker:
    """One request's thinker."""

    def __init__(self, connector: Connector, address: str, stream: str) -> None:
        self.source = StreamSource(stream, "thinker", BRIDGE)
        self._sender = connector.sender
        self._stream = stream
        self._sender.open(address, stream)

    def read(self, prompt: Sequence[int]) -> None:
        self._sender.push(self._stream, encode_tokens(prompt), {"kind": "prompt"})

    def write(self, *tokens: int) -> None:
        self._sender.push(self._stream, encode_tokens(tokens), {"kind": "tokens"})

    def end(self, reason: str = "stop") -> None:
        self._sender.end(self._stream, reason)

    def fail(self, message: str) -> None:
        self._sender.fail(self._stream, message)


class Talker:
    """The replica under test."""

    def __init__(self, requests: Requests, connector: Connector) -> None:
        self.requests = requests
        self.num_preempted = 0
        self._connector = connector
        self._ids = itertools.count()
        requests.client.record = self._record

    def _record(self, _: object, iteration: Any) -> None:
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs

    async def begin(
        self, num_frames: int, params: SamplingParams | None = None
    ) -> tuple[str, Thinker, Heard]:
        """Submit a request that waits for its thinker."""
        request_id = f"r{next(self._ids)}"
        address = self.requests.client.data_address
        assert address is not None, "a talker takes streams"
        thinker = Thinker(self._connector, address, f"{request_id}/thinker>talker")
        heard = Heard(self._connector, f"{request_id}/talker>code2wav")
        await self.requests.submit(
            request_id,
            None,
            params or greedy(num_frames, ignore_eos=False),
            [heard.target],
            sources=[thinker.source],
        )
        return request_id, thinker, heard

    async def speak(
        self,
        prompt: Sequence[int],
        reply: Sequence[int],
        num_frames: int,
        params: SamplingParams | None = None,
    ) -> list[list[int]]:
        """A whole reply at once."""
        request_id, thinker, heard = await self.begin(num_frames, params)
        thinker.read(prompt)
        if reply:
            thinker.write(*reply)
        thinker.end()
        codes = await heard.all()
        assert heard.end in ("stop", "length"), heard.error
        last = (await self.requests.all(request_id))[-1]
        assert last.failure is None, last.failure
        return codes


@asynccontextmanager
async def talker(
    model_dir: Path, max_batch_size: int = 8, **engine_args: object
) -> AsyncIterator[Talker]:
    with ExitStack() as stack:
        folder = RunDirectory.create("test-talker")
        stack.callback(folder.remove)
        connector = open_connector("test/0", folder.ipc("data"))
        stack.callback(connector.close)
        async with replica(
            model_dir,
            stage="talker",
            has_sources=True,
            max_batch_size=max_batch_size,
            hf_config=f"{FAMILY}.stage_configs:talker_config",
            start_timeout_s=300.0,
            engine_args={**ENGINE_ARGS, **engine_args},
        ) as requests:
            yield Talker(requests, connector)
