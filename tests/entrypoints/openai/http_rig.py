"""The real app over fake replicas: vLLM's serving on a tiny tokenizer, our routes, no process."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.fakes import (
    FakePreparer,
    FakeStageClient,
    Script,
    fake_omni,
    speaks,
    text_output,
    voice_pipeline,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import PipelineConfig, Task
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.media.playback import Playback
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media.wav import wav_header
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

MODEL = "tiny"
HELLO = ("Hello", " there,", " how are", " you?")
HELLO_TEXT = "".join(HELLO)
PLACEHOLDER = "<|audio|>"


def voices(model_dir: Path) -> Sequence[str]:
    return ("default", "other")


def speaking_pipeline(*, transcribes: bool = False) -> PipelineConfig:
    """Speech in, text, speech out, with two voices."""
    pipeline = voice_pipeline()
    entries = {
        task: stage
        for task, stage in pipeline.entries.items()
        if transcribes or task is not Task.TRANSCRIPTION
    }
    voices = "tests.entrypoints.openai.http_rig:voices"
    return dataclasses.replace(pipeline, entries=entries, voices=voices)


def answers(*pieces: str, reason: str = "stop") -> Script:
    """A text stage that writes these pieces: as deltas, or joined when a whole was asked for."""

    def script(request: StageRequest) -> Iterable[StageOutput]:
        assert isinstance(request.params, SamplingParams)
        is_stream = request.params.output_kind is RequestOutputKind.DELTA
        texts = pieces if is_stream else ("".join(pieces),)
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            output = text_output(request.request_id, text, finished=last, reason=reason)
            if request.params.logprobs is not None:
                for completion in output.text.outputs:
                    completion.logprobs = [{7: Logprob(-0.5, 1, "x")} for _ in completion.token_ids]
            yield output

    return script


def speaks_pcm(*parts: bytes, rate_hz: int = 22050) -> Script:
    """A voice that says these samples, one chunk each."""

    def script(request: StageRequest) -> Iterable[StageOutput]:
        for part in parts:
            yield StageOutput(request.request_id, audio=AudioChunk(part, rate_hz))
        yield StageOutput(request.request_id, True)

    return script


def play(rig: Rig, patch: pytest.MonkeyPatch, pcm: bytes, size: int) -> None:
    """The engine gives out text, then `pcm` in pieces of `size` bytes that nothing merges."""

    async def generate(*args: object, **kwargs: object) -> AsyncIterator[OmniRequestOutput]:
        text = text_output("r", HELLO_TEXT, finished=True).text
        yield OmniRequestOutput(request_id="r", stage="thinker", request_output=text)
        for at in range(0, len(pcm), size):
            chunk = AudioChunk(pcm[at : at + size], 22050)
            yield OmniRequestOutput(request_id="r", stage="voice", audio=chunk)
        yield OmniRequestOutput(request_id="r", stage="voice", finished=True)

    patch.setattr(rig.omni, "generate", generate)


def tone(num_samples: int, rate_hz: int = 22050) -> bytes:
    """A sine of 440 Hz, 16 bit."""
    wave = np.sin(np.arange(num_samples) * (2 * np.pi * 440 / rate_hz)) * 12000
    return wave.astype("<i2").tobytes()


def wav_base64(num_samples: int = 8000, rate_hz: int = 16000) -> str:
    """A recording as a client sends it."""
    pcm = tone(num_samples, rate_hz)
    return base64.b64encode(wav_header(rate_hz, len(pcm)) + pcm).decode()


def audio_part(data: str | None = None, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data or wav_base64(), "format": form}}


def say(content: object = "hi", **fields: object) -> dict[str, Any]:
    """A chat request of one message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def count_silences(patch: pytest.MonkeyPatch, room: str) -> list[tuple[str, float]]:
    """Where a server's silences go from now on. Its pieces of audio leave a second apart."""
    silences: list[tuple[str, float]] = []
    seconds = itertools.count()
    patch.setattr(NullMetrics, "audio_late", lambda _, *silence: silences.append(silence))
    patch.setattr(
        f"vllm_omni.entrypoints.openai.{room}.serving.Playback",
        lambda metrics: Playback(metrics, lambda: float(next(seconds))),
    )
    return silences


class RenderingPreparer(FakePreparer):
    """Passes prompts on like a fake, but lends vLLM's serving a real tokenizer."""

    def __init__(self, real: ArPreparer) -> None:
        super().__init__(real.vllm_config, real.renderer)
        self.input_processor = real.input_processor

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> object:
        return await super().prepare(request_id, prompt, params, options)


@dataclass(slots=True)
class Rig:
    """One server in this process and its replicas."""

    app: FastAPI
    omni: AsyncOmni
    http: httpx.AsyncClient
    asr: FakeStageClient
    thinker: FakeStageClient
    voice: FakeStageClient
    thinker_preparer: FakePreparer
    pool: MediaPool

    def reset(self) -> None:
        """As new, for the next test of a module that shares it. Replicas must be alive."""
        self.asr.script, self.thinker.script, self.voice.script = None, answers(*HELLO), speaks()
        for client in (self.asr, self.thinker, self.voice):
            client.added.clear()
            client.abort_calls.clear()
        self.omni.check_admission(self.omni.limits.max_in_flight)

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=say(**fields))

    async def events(self, **fields: object) -> list[Any]:
        """The parsed events of a streamed chat; the last is the word [DONE]."""
        response = await self.chat(stream=True, **fields)
        assert response.status_code == 200, response.text
        return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class TextParts:
    """What is slow to make and can be shared: arguments and vLLM's half of a text stage."""

    args: Namespace
    preparer: ArPreparer
    asr_preparer: ArPreparer | None = None


@asynccontextmanager
async def serving(
    parts: TextParts,
    *,
    limits: ServerLimits | None = None,
    pipeline: PipelineConfig | None = None,
    admin_key: str | None = None,
    deploy: Mapping[str, Any] | None = None,
    **arguments: object,
) -> AsyncIterator[Rig]:
    """The app over one fake replica for each stage; `arguments` replace vLLM's serve arguments."""
    asr, thinker, voice = (
        FakeStageClient(),
        FakeStageClient(answers(*HELLO)),
        FakeStageClient(speaks()),
    )
    preparer = RenderingPreparer(parts.preparer)
    preparers: dict[str, FakePreparer] = {"thinker": preparer}
    preparers["asr"] = RenderingPreparer(parts.asr_preparer or parts.preparer)
    omni = fake_omni(
        pipeline or speaking_pipeline(transcribes=parts.asr_preparer is not None),
        [[asr], [thinker], [voice]],
        limits=limits,
        preparers=preparers,
        deploy=deploy,
    )
    pool = MediaPool()
    args = Namespace(**{**vars(parts.args), **arguments})
    async with omni:
        app = await build_omni_app(args, omni, pool, admin_key)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://omni") as http:
            yield Rig(app, omni, http, asr, thinker, voice, preparer, pool)
    pool.close()


class _LiveServer(NoSignalServer):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class Served(Protocol):
    """Any rig with an app."""

    app: FastAPI


@asynccontextmanager
async def live(rig: Served) -> AsyncIterator[str]:
    """The rig's app behind uvicorn on loopback, for what must really stream; yields its URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    # Without vLLM's lifespan, which takes the app apart at its end: tests share it.
    config = uvicorn.Config(
        rig.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    server = _LiveServer(config)
    rig.app.state.server = server
    serving_task = asyncio.create_task(server.serve(sockets=[sock]))
    await server.listening.wait()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving_task


@asynccontextmanager
async def openai_client(rig: Served) -> AsyncIterator[AsyncOpenAI]:
    """The official client, talking to the rig over loopback."""
    async with (
        live(rig) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
