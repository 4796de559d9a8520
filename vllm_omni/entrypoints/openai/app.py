"""The FastAPI app: vLLM's own, with our serving classes, routes, handlers and middleware."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from vllm_omni.config.pipeline import PipelineConfig, Task
from vllm_omni.engine.ar_speech import SETTINGS_KEY
from vllm_omni.entrypoints.openai.admin.api_router import router as admin_router
from vllm_omni.entrypoints.openai.admin.serving import AdminServing
from vllm_omni.entrypoints.openai.admission import AdmissionMiddleware
from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.chat.api_router import router as chat_router
from vllm_omni.entrypoints.openai.chat.serving import ChatMedia, OmniServingChat
from vllm_omni.entrypoints.openai.completions.api_router import router as completions_router
from vllm_omni.entrypoints.openai.completions.serving import OmniServingCompletion
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.errors import install_error_handlers
from vllm_omni.entrypoints.openai.health.api_router import router as health_router
from vllm_omni.entrypoints.openai.images.pictures import DenoiseRequests
from vllm_omni.entrypoints.openai.input_memory import InputMemory
from vllm_omni.entrypoints.openai.media.connector import AttachedMediaStore, install_connector
from vllm_omni.entrypoints.openai.media.decode import AudioLimits
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.entrypoints.openai.media.image_loader import ImageLoader
from vllm_omni.entrypoints.openai.media.loader import MediaLoader
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media_app import bare_app, check_tasks, extend_with_media
from vllm_omni.entrypoints.openai.middleware import BodyLimitMiddleware, KeyMiddleware
from vllm_omni.entrypoints.openai.models.api_router import router as models_router
from vllm_omni.entrypoints.openai.models.names import ServedNames
from vllm_omni.entrypoints.openai.models.serving import OmniModels
from vllm_omni.entrypoints.openai.speech.api_router import router as speech_router
from vllm_omni.entrypoints.openai.speech.serving import SpeechServing
from vllm_omni.entrypoints.openai.transcriptions.api_router import router as transcription_router
from vllm_omni.entrypoints.openai.transcriptions.serving import OmniServingTranscription
from vllm_omni.entrypoints.openai.vllm_routes import ABSENT, VllmRoutesMiddleware

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs

_NO_DOMAIN = "none: send a data URL"
"""No host can have this name; vLLM's refusal shows it."""
_TEXT_ROUTERS: Final[tuple[APIRouter, ...]] = (
    chat_router,
    completions_router,
    speech_router,
    transcription_router,
)


async def build_omni_app(
    args: Namespace,
    omni: AsyncOmni,
    pool: MediaPool,
    admin_key: str | None = None,
    videos: VideoJobs | None = None,
) -> FastAPI:
    """The app over a running `AsyncOmni`. `args` are vLLM's parsed serve arguments.

    Without an `admin_key` the operators' routes answer 403. `videos` keeps what a pipeline that
    makes videos made. Without a stage that chats the app has none of vLLM's routes for text.
    """
    limits, capabilities = omni.config.limits, Capabilities.of(omni.config)
    client: OmniEngineClient | None = None
    fetcher = MediaFetcher(limits.media_fetch)
    if Task.CHAT in omni.pipeline.entries:
        client = OmniEngineClient(omni, Task.CHAT)
        # Beside data URLs vLLM's own fetcher would read any address; what has one is ours to fetch.
        client.model_config.allowed_media_domains = [_NO_DOMAIN]
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        models = OmniModels(app.state.openai_serving_models, capabilities)
        store = AttachedMediaStore(MediaLoader(limits, fetcher, pool))
        install_connector(store)
        _extend_state(args, app, omni, ChatMedia(capabilities, store, pool, omni.metrics))
        routers = _TEXT_ROUTERS
    else:
        check_tasks(omni.pipeline)
        app = bare_app(args, omni)
        models = OmniModels(ServedNames(args), capabilities)
        routers = ()
    app.state.omni = omni
    app.state.omni_models = models
    app.state.omni_admin = AdminServing(omni, admin_key)
    app.state.omni_speech = SpeechServing(omni, capabilities, models, pool, limits)
    images = ImageLoader(limits, fetcher, pool)
    requests = DenoiseRequests(omni, capabilities, models, images, pool)
    routers += extend_with_media(app, omni.config, requests, videos)
    for router in (health_router, models_router, *routers, admin_router):
        _include_instead(app, router)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) not in ABSENT
    ]
    # vLLM's builder has stacked its middleware already; stacked anew it takes in ours.
    app.middleware_stack = None
    install_error_handlers(app)
    if client is not None:
        app.add_middleware(VllmRoutesMiddleware, client=client)
    app.add_middleware(AdmissionMiddleware, omni=omni)
    memory = InputMemory(limits.max_input_bytes)
    app.add_middleware(BodyLimitMiddleware, max_bytes=limits.max_body_bytes, memory=memory)
    if keys := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
        app.add_middleware(KeyMiddleware, tokens=keys)
    return app


def _extend_state(args: Namespace, app: FastAPI, omni: AsyncOmni, media: ChatMedia) -> None:
    """Put our serving objects where the routers look: vLLM's that we extend are replaced."""
    state, limits = app.state, omni.config.limits
    state.openai_serving_chat = OmniServingChat(media, **_chat_arguments(args, app))
    pipeline = omni.config.pipeline
    state.openai_serving_completion = OmniServingCompletion(
        pipeline.stages[pipeline.stage_id(state.engine_client.stage)].default_params,
        engine_client=state.engine_client,
        models=state.openai_serving_models,
        online_renderer=state.online_renderer,
        request_logger=state.openai_serving_chat.request_logger,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        enable_force_include_usage=args.enable_force_include_usage,
        enable_per_request_metrics=args.enable_per_request_metrics,
    )
    state.openai_serving_transcription = None
    if Task.TRANSCRIPTION in omni.config.pipeline.entries:
        state.openai_serving_transcription = OmniServingTranscription(
            AudioLimits(limits.max_audio_bytes, limits.max_audio_s),
            settings=_speech_settings(omni.config.pipeline),
            engine_client=OmniEngineClient(omni, Task.TRANSCRIPTION),
            models=state.openai_serving_models,
            request_logger=state.openai_serving_chat.request_logger,
            enable_force_include_usage=args.enable_force_include_usage,
        )


def _speech_settings(pipeline: PipelineConfig) -> Mapping[str, object]:
    """What the pipeline's recogniser needs to know of its checkpoint (language, prompt)."""
    stage = pipeline.stages[pipeline.stage_id(pipeline.entries[Task.TRANSCRIPTION])]
    extra_args = stage.default_params.get("extra_args")
    return extra_args.get(SETTINGS_KEY, {}) if isinstance(extra_args, Mapping) else {}


def _chat_arguments(args: Namespace, app: FastAPI) -> dict[str, Any]:
    """As vLLM builds its own chat serving, which is read for what it resolved."""
    state = app.state
    made = state.openai_serving_chat
    return {
        "engine_client": state.engine_client,
        "models": state.openai_serving_models,
        "response_role": made.response_role,
        "online_renderer": state.online_renderer,
        "request_logger": made.request_logger,
        "chat_template": made.chat_template,
        "chat_template_content_format": made.chat_template_content_format,
        "default_chat_template_kwargs": made.default_chat_template_kwargs,
        "trust_request_chat_template": args.trust_request_chat_template,
        "return_tokens_as_token_ids": args.return_tokens_as_token_ids,
        "enable_auto_tools": args.enable_auto_tool_choice,
        "exclude_tools_when_tool_choice_none": args.exclude_tools_when_tool_choice_none,
        "tool_parser": args.tool_call_parser,
        "tool_strict_level": args.tool_strict_level,
        "reasoning_parser": args.structured_outputs_config.reasoning_parser,
        "enable_prompt_tokens_details": args.enable_prompt_tokens_details,
        "enable_force_include_usage": args.enable_force_include_usage,
        "enable_log_outputs": args.enable_log_outputs,
        "enable_log_deltas": args.enable_log_deltas,
        "enable_per_request_metrics": args.enable_per_request_metrics,
    }


def _include_instead(app: FastAPI, router: APIRouter) -> None:
    """Include a router in the place of vLLM's routes of the same path and methods."""
    before = list(app.router.routes)
    app.include_router(router)
    ours = app.router.routes[len(before) :]
    taken = {
        (route.path, method)
        for route in ours
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    kept = [
        route
        for route in before
        if not isinstance(route, APIRoute)
        or any((route.path, method) not in taken for method in route.methods)
    ]
    app.router.routes[:] = ours + kept
