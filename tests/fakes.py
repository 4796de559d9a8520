"""Fakes at the process seam: scriptable replicas and preparers, and whole engines made of them.

A `FakeStageClient` plays one replica. What it answers is its `script`: a function from a request
to outputs, or nothing, and then the test emits outputs itself. `fake_omni` runs the real
`AsyncOmni` with the real orchestrator thread over such replicas, without any process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits, StageDeploy
from vllm_omni.config.pipeline import Edge, Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.engine.mailbox import Outbox, OutputBatch
from vllm_omni.engine.messages import StageFailure, StageOutput, StageRequest
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.process_status import Heartbeat
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import OmniError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.media import AudioChunk

Script = Callable[[StageRequest], Iterable[StageOutput]]


def text_output(
    request_id: str,
    text: str = "",
    *,
    finished: bool = False,
    reason: str = "stop",
    token_ids: Sequence[int] | None = None,
    prompt_token_ids: Sequence[int] = (1, 2, 3),
) -> StageOutput:
    """An output of a text stage, as vLLM makes them; one token for each word unless told."""
    tokens = list(token_ids) if token_ids is not None else [7] * len(text.split())
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=tokens,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=reason if finished else None,
    )
    output = RequestOutput(request_id, None, list(prompt_token_ids), None, [completion], finished)
    return StageOutput(request_id, finished, text=output)


def audio_output(
    request_id: str, num_samples: int = 240, *, finished: bool = False, rate_hz: int = 24000
) -> StageOutput:
    """An output of a stage that speaks: a ramp, so that lost or doubled samples show."""
    pcm = b"".join((i % 1000).to_bytes(2, "little") for i in range(num_samples))
    return StageOutput(request_id, finished, audio=AudioChunk(pcm, rate_hz))


def end_output(request_id: str) -> StageOutput:
    """An end without any content."""
    return StageOutput(request_id, True)


def failure_output(request_id: str, message: str, code: str = "request_failed") -> StageOutput:
    return StageOutput(request_id, True, failure=StageFailure(code, message))


def says(*pieces: str) -> Script:
    """A text stage that writes these pieces as deltas, the last one with its end."""

    def script(request: StageRequest) -> Iterable[StageOutput]:
        for i, piece in enumerate(pieces):
            yield text_output(request.request_id, piece, finished=i == len(pieces) - 1)

    return script


def speaks(num_chunks: int = 2, num_samples: int = 240) -> Script:
    """A voice that makes this many chunks, the last one with its end."""

    def script(request: StageRequest) -> Iterable[StageOutput]:
        for i in range(num_chunks):
            yield audio_output(request.request_id, num_samples, finished=i == num_chunks - 1)

    return script


@dataclass(slots=True)
class FakeMetrics:
    num_running: int = 0
    num_waiting: int = 0


class FakeStageClient:
    """One replica that a test plays. Its methods may be called from any thread."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        stage_id: int = 0,
        replica_id: int = 0,
        kind: StageKind = StageKind.AUTOREGRESSIVE,
        data_address: str | None = "fake://data",
    ) -> None:
        self.stage_id = stage_id
        self.replica_id = replica_id
        self.kind = kind
        self.data_address = data_address
        self.script = script
        self.added: list[StageRequest] = []
        self.updated: list[StageRequest] = []
        self.abort_calls: list[list[str]] = []
        self.ended_sources: list[tuple[str, str]] = []
        self.utility_calls: list[tuple[str, tuple[object, ...]]] = []
        self.shutdown_calls = 0
        self.add_error: Exception | None = None
        """Raised by the next submits."""
        self.add_gate: asyncio.Event | None = None
        """Submits wait for it."""
        self.beat: Heartbeat | None = Heartbeat(math.inf, 0, 0)
        """Its latest; an idle one of this moment unless the test says otherwise."""
        self.utility: Callable[..., object] = lambda method, *args: None
        self._outputs: list[StageOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"<FakeStageClient {self.stage_id}/{self.replica_id} added={len(self.added)}>"

    @property
    def added_ids(self) -> list[str]:
        return [request.request_id for request in self.added]

    def emit(self, *outputs: StageOutput) -> None:
        """Make outputs, as one engine step."""
        self._post(lambda: self._outputs.extend(outputs))

    def crash(self, message: str = "killed") -> None:
        """Die: whoever waits hears of it at once."""
        self.fail(EngineDeadError(message))

    def fail(self, error: Exception) -> None:
        """Reading outputs raises this from now on."""

        def die() -> None:
            self._error = error

        self._post(die)

    def _post(self, change: Callable[[], None]) -> None:
        def act() -> None:
            change()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        if self._loop is None or _running_loop() is self._loop:
            act()
        else:
            self._loop.call_soon_threadsafe(act)

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise self._error

    async def add_request_async(self, request: StageRequest) -> None:
        if self.add_gate is not None:
            await self.add_gate.wait()
        if self.add_error is not None:
            raise self.add_error
        self._raise_if_dead()
        self.added.append(request)
        if self.script is not None:
            self.emit(*self.script(request))

    async def update_request_async(self, request: StageRequest) -> None:
        if self.add_error is not None:
            raise self.add_error
        self._raise_if_dead()
        self.updated.append(request)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self.abort_calls.append(list(request_ids))

    async def source_ended_async(self, request_id: str, stream: str) -> None:
        self.ended_sources.append((request_id, stream))

    async def get_outputs_async(self) -> Sequence[StageOutput]:
        self._loop = asyncio.get_running_loop()
        while not self._outputs:
            self._raise_if_dead()
            self._waiter = self._loop.create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def check_health(self) -> None:
        if isinstance(self._error, EngineDeadError):
            raise self._error

    async def call_utility_async(self, method: str, *args: object) -> object:
        self._raise_if_dead()
        self.utility_calls.append((method, args))
        result = self.utility(method, *args)
        return await result if asyncio.iscoroutine(result) else result

    def metrics(self) -> FakeMetrics:
        return FakeMetrics(num_running=len(self.added))

    def heartbeat(self) -> Heartbeat | None:
        return self.beat

    async def shutdown_async(self, timeout_s: float) -> None:
        self.shutdown_calls += 1


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class FakePreparer:
    """The API's side of a stage: passes prompts on, or raises what it is told to."""

    def __init__(self, vllm_config: Any = None, renderer: Any = None) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config if vllm_config is not None else None
        self.renderer = renderer
        self.input_processor: Any = None
        self.error: OmniError | None = None
        self.prepared: list[OmniPrompt] = []
        self.params: list[object] = []
        self.options: list[dict[str, object]] = []
        self.gate: asyncio.Event | None = None
        """Preparing waits for it."""
        self.shutdown_calls = 0

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> object:
        self.prepared.append(prompt)
        self.params.append(params)
        self.options.append(options)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return prompt

    async def render_messages(
        self,
        messages: Any,
        template_kwargs: Mapping[str, object] | None = None,
        processor_kwargs: Mapping[str, object] | None = None,
    ) -> OmniPrompt:
        return OmniPrompt(text="\n".join(_flat(message["content"]) for message in messages))

    def source_context(self, params: object) -> dict[str, Any]:
        return {"params": type(params).__name__}

    def shutdown(self) -> None:
        self.shutdown_calls += 1


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


@dataclass(slots=True)
class FakeLauncher:
    """Gives out prepared clients and preparers instead of starting anything."""

    clients: Sequence[Sequence[FakeStageClient]]
    preparers: Mapping[str, FakePreparer] = field(default_factory=dict)
    start_errors: Mapping[str, Exception] = field(default_factory=dict)
    """By `stage/replica`."""
    on_start: Callable[[ReplicaSpec], Any] | None = None
    """Awaited before a replica is ready."""
    restarted: list[FakeStageClient] = field(default_factory=list)
    """Later incarnations, with the scripts of the first ones."""

    def replica_specs(self, config: ResolvedConfig) -> list[ReplicaSpec]:
        return [
            ReplicaSpec(
                stage=stage.config.name,
                stage_id=stage.stage_id,
                replica_id=replica_id,
                kind=stage.config.kind,
                model_dir=stage.model_dir,
                model_class=None,
                devices=(stage.deploy.devices or ("cpu",))[replica_id : replica_id + 1] or ("cpu",),
                num_threads=1,
                max_batch_size=8,
                start_timeout_s=10.0,
                engine_args=stage.deploy.engine_args,
            )
            for stage in config.stages
            for replica_id in range(stage.deploy.num_replicas)
        ]

    async def start_replica(self, spec: ReplicaSpec) -> FakeStageClient:
        if self.on_start is not None:
            await self.on_start(spec)
        if spec.name in self.start_errors:
            raise self.start_errors[spec.name]
        client = self.clients[spec.stage_id][spec.replica_id]
        if spec.incarnation > 1:
            client = FakeStageClient(client.script, data_address=f"fake://{spec.incarnation_name}")
            self.restarted.append(client)
        client.stage_id, client.replica_id, client.kind = spec.stage_id, spec.replica_id, spec.kind
        return client

    def make_preparer(self, stage: ResolvedStage, config: ResolvedConfig) -> FakePreparer:
        return self.preparers.get(stage.config.name) or FakePreparer()


def join_texts(prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]) -> OmniPrompt:
    """A prompt bridge: the upstream stages' words, one after the other."""
    words = [
        output.text.outputs[0].text
        for outputs in upstream.values()
        for output in outputs
        if output.text is not None
    ]
    return OmniPrompt(text=" ".join(words))


def chain_pipeline(
    num_stages: int = 3, bridge: str = "tests.fakes:join_texts", *, streams: bool = False
) -> PipelineConfig:
    """Text stages in a row; the last one writes the audio, the first one the text."""
    names = [f"s{i}" for i in range(num_stages)]
    last = num_stages - 1
    stages = tuple(
        StageConfig(
            name=name,
            kind=StageKind.ONE_SHOT if i == last and i else StageKind.AUTOREGRESSIVE,
            emits={last: Modality.AUDIO, 0: Modality.TEXT}.get(i),
        )
        for i, name in enumerate(names)
    )
    edges = tuple(
        Edge(source=a, target=b, bridge=bridge, streams=streams)
        for a, b in itertools.pairwise(names)
    )
    return PipelineConfig(
        model_type="fake_chain",
        stages=stages,
        edges=edges,
        entries={Task.CHAT: "s0", Task.SPEECH: names[-1]},
    )


def voice_pipeline() -> PipelineConfig:
    """Speech in, text, speech out: one prompt edge and one streaming edge."""
    return PipelineConfig(
        model_type="fake_voice",
        stages=(
            StageConfig(
                name="asr",
                kind=StageKind.AUTOREGRESSIVE,
                accepts=frozenset({Modality.AUDIO}),
                emits=Modality.TEXT,
            ),
            StageConfig(name="thinker", kind=StageKind.AUTOREGRESSIVE, emits=Modality.TEXT),
            StageConfig(name="voice", kind=StageKind.ONE_SHOT, emits=Modality.AUDIO),
        ),
        edges=(
            Edge(
                source="asr",
                target="thinker",
                bridge="tests.fakes:join_texts",
                when=frozenset({Modality.AUDIO}),
            ),
            Edge(source="thinker", target="voice", bridge="tests.fakes:clauses", streams=True),
        ),
        entries={Task.CHAT: "thinker", Task.SPEECH: "voice", Task.TRANSCRIPTION: "asr"},
        placeholders={Modality.AUDIO: "<|audio|>"},
    )


def fake_config(
    pipeline: PipelineConfig,
    num_replicas: Sequence[int] | None = None,
    limits: ServerLimits | None = None,
    devices: Mapping[str, tuple[str, ...]] | None = None,
    deploy: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """`deploy` are further fields of every stage's `StageDeploy`; dead replicas stay dead unless
    it says otherwise."""
    counts = num_replicas or [1] * len(pipeline.stages)
    return ResolvedConfig(
        model_dir=Path("/nowhere"),
        pipeline=pipeline,
        stages=tuple(
            ResolvedStage(
                stage_id=i,
                config=stage,
                deploy=StageDeploy(
                    num_replicas=counts[i],
                    devices=(devices or {}).get(stage.name, ()),
                    **{"max_restarts": 0, **(deploy or {})},
                ),
                model_dir=Path("/nowhere"),
            )
            for i, stage in enumerate(pipeline.stages)
        ),
        limits=limits or ServerLimits(),
    )


def fake_omni(
    pipeline: PipelineConfig,
    clients: Sequence[Sequence[FakeStageClient]],
    *,
    limits: ServerLimits | None = None,
    preparers: Mapping[str, FakePreparer] | None = None,
    metrics: EngineMetrics | None = None,
    deploy: Mapping[str, Any] | None = None,
) -> AsyncOmni:
    """A started `AsyncOmni` over fake replicas: `clients[stage_id][replica_id]`.

    Close it with `await omni.aclose()`, or use it in `async with`.
    """
    launcher = FakeLauncher(clients, preparers or {})
    config = fake_config(pipeline, [len(replicas) for replicas in clients], limits, deploy=deploy)
    return AsyncOmni(config=config, launcher=launcher, metrics=metrics)


async def next_batches(outbox: Outbox) -> list[OutputBatch]:
    """Wait until there is something for clients, and take it."""
    is_there = asyncio.Event()
    outbox.listen(is_there.set)
    await is_there.wait()
    return outbox.take()


async def settle(rounds: int = 20) -> None:
    """Let everything that can run on this loop run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def eventually(predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end_s, "it did not happen in time"
        await asyncio.sleep(0.02)
