"""The real app of a picture or video pipeline over a fake replica, without any text stage."""

from __future__ import annotations

import base64
import io
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from PIL import Image

from tests.fakes import FakePreparer, FakeStageClient, Script, fake_omni
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.diffusion.checks import make_request
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.store import VideoStore
from vllm_omni.outputs.media import Frames, StepProgress

MODEL = "tiny-pictures"
SIZE = 32
"""Of the pictures that the fake replica makes unless told otherwise."""
STEPS = 4
PICTURES = Capabilities(
    mode=ExecutionMode.STEP,
    params=frozenset(
        {"guidance_scale", "true_cfg_scale", "negative_prompt", "strength", "preview_interval"}
    ),
    defaults={"num_inference_steps": STEPS, "height": SIZE, "width": SIZE},
    max_pixels=256 * 256,
    max_steps=50,
    max_images=2,
    takes_mask=True,
    has_preview=True,
)
VIDEOS = replace(
    PICTURES,
    emits=Modality.VIDEO,
    params=frozenset({"guidance_scale", "negative_prompt", "num_frames", "fps"}),
    defaults={
        "num_inference_steps": STEPS,
        "height": SIZE,
        "width": SIZE,
        "num_frames": 9,
        "fps": 8,
    },
    max_frames=41,
    frames_multiple=4,
    max_images=1,
    takes_mask=False,
    has_preview=False,
)


def picture_pipeline(task: Task = Task.IMAGE) -> PipelineConfig:
    """One diffusion stage."""
    emits = Modality.IMAGE if task is Task.IMAGE else Modality.VIDEO
    stage = StageConfig(
        name="diffusion",
        kind=StageKind.DIFFUSION,
        emits=emits,
        capabilities=f"tests.entrypoints.openai.picture_rig:{emits}_capabilities",
    )
    return PipelineConfig(model_type="fake_pictures", stages=(stage,), entries={task: "diffusion"})


def image_capabilities(model_dir: Path) -> Capabilities:
    return PICTURES


def video_capabilities(model_dir: Path) -> Capabilities:
    return VIDEOS


def pixels(seed: int, num_frames: int = 1, height: int = SIZE, width: int = SIZE) -> Any:
    """Frames that show which seed made them, and which frame they are."""
    rows = np.arange(height, dtype=np.uint8)[None, :, None, None] * 2
    frames = np.zeros((num_frames, height, width, 3), np.uint8) + rows
    frames[..., 0] = seed % 256
    frames[..., 1] = np.arange(num_frames, dtype=np.uint8)[:, None, None]
    return frames


def wanted_of(request: StageRequest, capabilities: Capabilities) -> DiffusionRequest:
    """What a replica was asked for, as the engine reads it."""
    return make_request(request.request_id, request.prompt, request.params, capabilities)


def paints(capabilities: Capabilities = PICTURES) -> Script:
    """A replica that takes its steps and gives what it was asked for."""

    def script(request: StageRequest) -> Iterable[StageOutput]:
        wanted = wanted_of(request, capabilities)
        steps = wanted.num_inference_steps
        interval = request.params.preview_interval
        for step in range(1, steps + 1):
            yield StageOutput(request.request_id, progress=StepProgress(step, steps))
            if interval and step % interval == 0 and step < steps:
                preview = Frames.of(pixels(step, 1, 8, 8)[0])
                yield StageOutput(request.request_id, preview=preview)
        made = pixels(wanted.seed, wanted.num_frames, wanted.height, wanted.width)
        frames = Frames.of(made if wanted.fps else made[0], wanted.fps)
        yield StageOutput(request.request_id, True, frames=frames)

    return script


def png(width: int = SIZE, height: int = SIZE, mode: str = "RGB", color: Any = 0) -> bytes:
    """A picture as a client sends it."""
    buffer = io.BytesIO()
    Image.new(mode, (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def opened(base64_text: str) -> Image.Image:
    """A picture of an answer."""
    return Image.open(io.BytesIO(base64.b64decode(base64_text)))


@dataclass(slots=True)
class PictureRig:
    """One server in this process and its replica."""

    app: FastAPI
    omni: AsyncOmni
    http: httpx.AsyncClient
    replica: FakeStageClient
    jobs: VideoJobs | None
    capabilities: Capabilities

    async def generate(self, prompt: str = "a fox", **fields: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, **fields}
        return await self.http.post("/v1/images/generations", json=body)

    async def edit(
        self, files: list[tuple[str, Any]], prompt: str = "a fox", **fields: object
    ) -> httpx.Response:
        data = {"prompt": prompt, **{name: str(value) for name, value in fields.items()}}
        return await self.http.post("/v1/images/edits", data=data, files=files)

    @property
    def requested(self) -> DiffusionRequest:
        """What the replica was last asked for."""
        return wanted_of(self.replica.added[-1], self.capabilities)


@asynccontextmanager
async def picture_server(
    args: Namespace,
    *,
    task: Task = Task.IMAGE,
    script: Script | None = None,
    limits: ServerLimits | None = None,
    data_dir: Path | None = None,
    clock: Callable[[], float] | None = None,
    preparer: FakePreparer | None = None,
    deploy: Mapping[str, Any] | None = None,
    **arguments: object,
) -> AsyncIterator[PictureRig]:
    """`arguments` replace vLLM's serve arguments."""
    capabilities = PICTURES if task is Task.IMAGE else VIDEOS
    replica = FakeStageClient(script or paints(capabilities), kind=StageKind.DIFFUSION)
    real: Any = preparer or DiffusionPreparer("diffusion", capabilities)
    omni = fake_omni(
        picture_pipeline(task), [[replica]], limits=limits, preparers={"diffusion": real},
        deploy=deploy,
    )  # fmt: skip
    args = Namespace(**{**vars(args), "served_model_name": [MODEL], **arguments})
    pool = MediaPool()
    async with AsyncExitStack() as stack:
        stack.callback(pool.close)
        await stack.enter_async_context(omni)
        jobs = None
        if data_dir is not None:
            given = {} if clock is None else {"clock": clock}
            store = VideoStore(data_dir, omni.limits, **given)
            stack.callback(store.close)
            jobs = await stack.enter_async_context(VideoJobs.running(store, pool, omni.limits))
        app = await build_omni_app(args, omni, pool, None, jobs)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://omni")
        )
        yield PictureRig(app, omni, http, replica, jobs, capabilities)
