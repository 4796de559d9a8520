"""POST and GET /v1/videos, and GET, DELETE, content and cancel of one."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from vllm_omni.entrypoints.openai.media.forms import read_media_body
from vllm_omni.entrypoints.openai.responses import counted, until_disconnect
from vllm_omni.entrypoints.openai.videos.protocol import VideoRequest
from vllm_omni.entrypoints.openai.videos.serving import VideoServing

router = APIRouter()
POLL_HEADER: Final = "openai-poll-after-ms"
_SCHEMA = VideoRequest.model_json_schema()
_FORM_SCHEMA = {
    **_SCHEMA,
    "properties": {
        **_SCHEMA["properties"],
        "input_reference": {"type": "string", "format": "binary"},
    },
}
_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {"schema": _FORM_SCHEMA},
        "application/json": {"schema": _SCHEMA},
    },
}


def _serving(raw_request: Request) -> VideoServing:
    serving: VideoServing = raw_request.app.state.omni_videos
    return serving


@router.post("/v1/videos", openapi_extra={"requestBody": _BODY}, response_model=None)
@counted
async def create_video(raw_request: Request) -> Response:
    """Begin a video: a form, perhaps with a picture, or JSON."""
    serving = _serving(raw_request)
    serving.check_admission()
    body = await read_media_body(raw_request, raw_request.app.state.omni.limits)
    given = body.take_images("input_reference")
    request = body.parse(VideoRequest)
    return JSONResponse(await until_disconnect(raw_request, serving.create(request, given)))


@router.get("/v1/videos", response_model=None)
async def list_videos(
    raw_request: Request, after: str | None = None, limit: int = 20, order: str = "desc"
) -> Response:
    """The jobs of this server, newest first unless told."""
    return JSONResponse(await _serving(raw_request).list(after, limit, order))


@router.get("/v1/videos/{video_id}", response_model=None)
async def retrieve_video(video_id: str, raw_request: Request) -> Response:
    """What a job is at, and when to ask again: OpenAI's client waits so long."""
    serving = _serving(raw_request)
    body = await serving.get(video_id)
    after_ms = round(serving.poll_after_s(video_id) * 1000)
    return JSONResponse(body, headers={POLL_HEADER: str(after_ms)})


@router.get("/v1/videos/{video_id}/content", response_model=None)
async def download_video(video_id: str, raw_request: Request, variant: str = "video") -> Response:
    """A video's file, or a small picture of it."""
    file = await _serving(raw_request).content(video_id, variant)
    return FileResponse(file.path, media_type=file.media_type, filename=file.path.name)


@router.post("/v1/videos/{video_id}/cancel", response_model=None)
async def cancel_video(video_id: str, raw_request: Request) -> Response:
    """Stop a job that runs."""
    return JSONResponse(await _serving(raw_request).cancel(video_id))


@router.delete("/v1/videos/{video_id}", response_model=None)
async def delete_video(video_id: str, raw_request: Request) -> Response:
    """Delete a job and its files."""
    return JSONResponse(await _serving(raw_request).delete(video_id))
