"""What orchestration costs: the whole path of `AsyncOmni` below HTTP, over engines without work.

Three stages in a row, each answering at once, in this process. Two event loops in two threads
share the interpreter, as in the server. Reported are

* the latency that orchestration adds to a request that is alone,
* requests per second with 256 in flight,
* streamed outputs per second, 100 a request with 32 in flight, twice: `paced`, where the engine
  makes its next step when every client has the last one, so that nothing is merged and each
  output is one wake-up of its client; and `free`, where the engine runs ahead and what a client
  has not taken is merged for it,
* growth of resident memory over 20,000 requests.

    python benchmarks/orchestrator.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits, StageDeploy
from vllm_omni.config.pipeline import Edge, Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.process_status import Heartbeat
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.inputs.prompt import OmniPrompt

GOALS = {
    "latency_ms_p50_c1": "<= 0.5",
    "requests_per_s": ">= 5000",
    "streamed_outputs_per_s": ">= 40000",
    "rss_growth_mb": "flat",
}
PROMPT = OmniPrompt(text="hello")
NUM_STAGES = 3


class InstantEngine:
    """A replica whose every step gives one output to each of its requests, at once."""

    kind = StageKind.AUTOREGRESSIVE
    data_address: str | None = None
    num_running = 0
    num_waiting = 0

    def __init__(self, stage_id: int) -> None:
        self.stage_id = stage_id
        self.replica_id = 0
        self.num_outputs = 1
        self.is_paced = False
        """The next step waits until every output of the last one was read."""
        self._remaining: dict[str, int] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_unread = 0

    async def add_request_async(self, request: StageRequest) -> None:
        self._remaining[request.request_id] = self.num_outputs
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def read_one(self) -> None:
        """A client has taken an output (called on the API's loop)."""
        self.num_unread -= 1
        if self.num_unread == 0 and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    async def get_outputs_async(self) -> Sequence[StageOutput]:
        self._loop = asyncio.get_running_loop()
        while not self._remaining or self.num_unread > 0:
            self._waiter = self._loop.create_future()
            await self._waiter
        return list(self._step())

    def _step(self) -> Iterator[StageOutput]:
        for request_id, remaining in list(self._remaining.items()):
            if remaining == 1:
                del self._remaining[request_id]
            else:
                self._remaining[request_id] = remaining - 1
            if self.is_paced:
                self.num_unread += 1
            yield _output(request_id, is_last=remaining == 1)

    async def update_request_async(self, request: StageRequest) -> None:
        raise NotImplementedError

    async def source_ended_async(self, request_id: str, stream: str) -> None:
        pass

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._remaining.pop(request_id, None)

    def check_health(self) -> None:
        pass

    async def call_utility_async(self, method: str, *args: object) -> object:
        raise NotImplementedError

    def metrics(self) -> InstantEngine:
        return self

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(time.monotonic(), 0, 0)

    async def shutdown_async(self, timeout_s: float) -> None:
        pass


def _output(request_id: str, *, is_last: bool) -> StageOutput:
    completion = CompletionOutput(0, " word", [42], None, None)
    if is_last:
        completion.finish_reason = "length"
    text = RequestOutput(request_id, None, [1, 2, 3], None, [completion], is_last)
    return StageOutput(request_id, is_last, text)


class PassThrough:
    """A preparer that has nothing to do."""

    vllm_config: Any = None
    model_config: Any = None
    renderer: Any = None
    input_processor: Any = None

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> object:
        return prompt

    async def render_messages(
        self, messages: object, template_kwargs: Mapping[str, object] | None = None
    ) -> OmniPrompt:
        return PROMPT

    def source_context(self, params: object) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class InstantLauncher:
    def __init__(self, engines: Sequence[InstantEngine]) -> None:
        self._engines = engines

    def replica_specs(self, config: ResolvedConfig) -> list[ReplicaSpec]:
        return [
            ReplicaSpec(
                stage=stage.config.name,
                stage_id=stage.stage_id,
                replica_id=0,
                kind=stage.config.kind,
                model_dir=stage.model_dir,
                model_class=None,
                devices=("cpu",),
                num_threads=1,
                max_batch_size=8,
                start_timeout_s=10.0,
            )
            for stage in config.stages
        ]

    async def start_replica(self, spec: ReplicaSpec) -> InstantEngine:
        return self._engines[spec.stage_id]

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> PassThrough:
        return PassThrough()


def pass_on(prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]) -> OmniPrompt:
    """The bridge between the stages."""
    return prompt


def three_stages() -> ResolvedConfig:
    names = [f"stage{i}" for i in range(NUM_STAGES)]
    stages = tuple(
        StageConfig(
            name=name,
            kind=StageKind.AUTOREGRESSIVE,
            emits=Modality.TEXT if i == NUM_STAGES - 1 else None,
        )
        for i, name in enumerate(names)
    )
    edges = tuple(
        Edge(source=names[i], target=names[i + 1], bridge=f"{__name__}:pass_on")
        for i in range(NUM_STAGES - 1)
    )
    pipeline = PipelineConfig(
        model_type="benchmark", stages=stages, edges=edges, entries={Task.CHAT: names[0]}
    )
    return ResolvedConfig(
        model_dir=Path(),
        pipeline=pipeline,
        stages=tuple(
            ResolvedStage(stage_id=i, config=stage, deploy=StageDeploy(), model_dir=Path())
            for i, stage in enumerate(stages)
        ),
        limits=ServerLimits(max_in_flight=512),
    )


class Bench:
    """One engine, measured in several ways."""

    def __init__(self) -> None:
        self._engines = [InstantEngine(i) for i in range(NUM_STAGES)]
        self.omni = AsyncOmni(config=three_stages(), launcher=InstantLauncher(self._engines))
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        self._params = [None, None, params]

    async def _request(self) -> tuple[int, int]:
        """Run one request to its end; returns how many outputs and tokens arrived."""
        num_outputs = num_tokens = 0
        last = self._engines[-1]
        async for output in self.omni.generate(PROMPT, sampling_params_list=self._params):
            num_outputs += 1
            num_tokens += len(output.outputs[0].token_ids)
            if last.is_paced:
                last.read_one()
        return num_outputs, num_tokens

    async def _many(self, num_requests: int, in_flight: int) -> tuple[float, int, int]:
        """Seconds, outputs and tokens of this many requests with so many in flight."""
        waiting = iter(range(num_requests))
        outputs = tokens = 0

        async def client() -> None:
            nonlocal outputs, tokens
            for _ in waiting:
                some, words = await self._request()
                outputs += some
                tokens += words

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(in_flight):
                clients.create_task(client())
        return time.perf_counter() - began_s, outputs, tokens

    async def latency_ms(self, num_requests: int) -> float:
        """Median latency of a request that is alone."""
        latencies = []
        for _ in range(num_requests):
            began_s = time.perf_counter()
            await self._request()
            latencies.append(time.perf_counter() - began_s)
        return statistics.median(latencies) * 1e3

    async def requests_per_s(self, num_requests: int) -> float:
        seconds, _, _ = await self._many(num_requests, 256)
        return num_requests / seconds

    async def streamed_per_s(self, num_requests: int, *, paced: bool) -> tuple[float, float]:
        """Outputs and tokens that clients received per second."""
        last = self._engines[-1]
        last.num_outputs = 100
        last.is_paced = paced
        seconds, outputs, tokens = await self._many(num_requests, 32)
        last.num_outputs, last.is_paced = 1, False
        assert tokens == 100 * num_requests, "tokens were lost or doubled"
        assert not paced or outputs == tokens, "a paced output was merged"
        return outputs / seconds, tokens / seconds

    async def rss_growth_mb(self, num_requests: int) -> float:
        gc.collect()
        before = _rss_mb()
        await self._many(num_requests, 256)
        gc.collect()
        return _rss_mb() - before


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(scale: float) -> dict[str, float]:
    bench = Bench()
    freeze_gc_heap()  # as vLLM's server does once it is up
    async with bench.omni:
        await bench.requests_per_s(int(4000 * scale))  # warm
        latency = await bench.latency_ms(int(2000 * scale))
        requests = max([await bench.requests_per_s(int(10000 * scale)) for _ in range(3)])
        paced, _ = await bench.streamed_per_s(int(640 * scale), paced=True)
        _, free = await bench.streamed_per_s(int(640 * scale), paced=False)
        growth = await bench.rss_growth_mb(int(20000 * scale))
    gc.unfreeze()
    return {
        "latency_ms_p50_c1": round(latency, 4),
        "requests_per_s": round(requests),
        "streamed_outputs_per_s": round(paced),
        "streamed_tokens_per_s_free": round(free),
        "rss_growth_mb": round(growth, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    arguments = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        figures = asyncio.run(measure(0.1 if arguments.quick else 1.0))
    else:
        figures = uvloop.run(measure(0.1 if arguments.quick else 1.0))
    print(f"{'figure':30} {'value':>12}   goal")
    for name, value in figures.items():
        print(f"{name:30} {value:>12}   {GOALS.get(name, '')}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
