"""What an app has for pictures, videos and speech, with or without a text stage of vLLM's."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, FastAPI
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.serve.instrumentator import register_instrumentator_api_routers
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import PipelineConfig, Task
from vllm_omni.entrypoints.openai.image_chat.api_router import router as image_chat_router
from vllm_omni.entrypoints.openai.image_chat.serving import ImageChatServing
from vllm_omni.entrypoints.openai.images.api_router import router as images_router
from vllm_omni.entrypoints.openai.images.pictures import DenoiseRequests
from vllm_omni.entrypoints.openai.images.serving import ImageServing
from vllm_omni.entrypoints.openai.speech.api_router import router as speech_router
from vllm_omni.entrypoints.openai.videos.api_router import router as videos_router
from vllm_omni.entrypoints.openai.videos.serving import VideoServing
from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs

_WITHOUT_TEXT: Final = frozenset({Task.IMAGE, Task.VIDEO, Task.SPEECH})


def check_tasks(pipeline: PipelineConfig) -> None:
    """Refuse a pipeline without a chat that needs vLLM's serving all the same.

    Raises:
        ConfigError: names the task.
    """
    for task in pipeline.entries:
        if task not in _WITHOUT_TEXT:
            raise ConfigError(
                f"pipeline {pipeline.model_type!r}: {task} is served beside a chat only"
            )


def bare_app(args: Namespace, omni: AsyncOmni) -> FastAPI:
    """As vLLM builds its app, without what needs a text model."""
    has_docs = not (args.disable_fastapi_docs or args.enable_offline_docs)
    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
        docs_url="/docs" if has_docs else None,
        redoc_url="/redoc" if has_docs else None,
    )
    state = app.state
    state.args = args
    app.root_path = args.root_path
    state.engine_client = omni
    state.log_stats = not args.disable_log_stats
    state.enable_server_load_tracking = args.enable_server_load_tracking
    state.server_load_metrics = 0
    register_instrumentator_api_routers(app)
    init_entrypoints_middleware(args, app, ())
    return app


def extend_with_media(
    app: FastAPI, config: ResolvedConfig, requests: DenoiseRequests, videos: VideoJobs | None
) -> tuple[APIRouter, ...]:
    """Serving objects of the media that the pipeline makes, and their routers."""
    entries, limits = config.pipeline.entries, config.limits
    routers: list[APIRouter] = []
    if Task.IMAGE in entries:
        app.state.omni_images = ImageServing(requests)
        routers.append(images_router)
        if Task.CHAT not in entries:
            app.state.omni_image_chat = ImageChatServing(requests)
            routers.append(image_chat_router)
    if Task.VIDEO in entries:
        assert videos is not None, "a pipeline that makes videos has a store for them"
        app.state.omni_videos = VideoServing(requests, videos, limits.video_timeout_s)
        routers.append(videos_router)
    if Task.SPEECH in entries and Task.CHAT not in entries:
        routers.append(speech_router)
    return tuple(routers)
