"""The real app over fake replicas: vLLM's serving on a tiny tokenizer, our routes, no process."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from tests.fakes import FakePreparer, FakeStageClient, fake_omni, says, speaks, voice_pipeline
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import PipelineConfig, Task
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.inputs.prompt import OmniPrompt

MODEL = "tiny"
HELLO = ("Hello", " there,", " how are", " you?")
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


def say(content: object = "hi", **fields: object) -> dict[str, Any]:
    """A chat request of one message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


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
    **arguments: object,
) -> AsyncIterator[Rig]:
    """The app over one fake replica for each stage; `arguments` replace vLLM's serve arguments."""
    asr, thinker, voice = FakeStageClient(), FakeStageClient(says(*HELLO)), FakeStageClient(speaks())
    preparer = RenderingPreparer(parts.preparer)
    preparers: dict[str, FakePreparer] = {"thinker": preparer}
    preparers["asr"] = RenderingPreparer(parts.asr_preparer or parts.preparer)
    omni = fake_omni(
        pipeline or speaking_pipeline(transcribes=parts.asr_preparer is not None),
        [[asr], [thinker], [voice]],
        limits=limits,
        preparers=preparers,
    )
    pool = MediaPool()
    args = Namespace(**{**vars(parts.args), **arguments})
    async with omni:
        app = await build_omni_app(args, omni, pool)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://omni") as http:
            yield Rig(app, omni, http, asr, thinker, voice, preparer, pool)
    pool.close()
