"""Videos by OpenAI's API: checks, jobs, and what is told of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.errors import AnsweredError, HttpError
from vllm_omni.entrypoints.openai.images.pictures import DenoiseRequests, denoise_params
from vllm_omni.entrypoints.openai.media.image_loader import InputImages
from vllm_omni.entrypoints.openai.videos.files import Variant
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.protocol import VideoRequest, frames_for, parse_seconds
from vllm_omni.entrypoints.openai.videos.record import (
    VideoRecord,
    VideoStatus,
    is_video_id,
    new_video_id,
)
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams

_DEFAULT_FPS: Final = 16
_INPUT: Final = "input_reference"


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A file to send."""

    path: Path
    media_type: str


class VideoServing:
    """Knows no HTTP."""

    def __init__(self, requests: DenoiseRequests, jobs: VideoJobs, timeout_s: float) -> None:
        """`timeout_s` is a job's deadline once the engine has it."""
        self._requests = requests
        self._jobs = jobs
        self._timeout_s = timeout_s

    def check_admission(self) -> None:
        """Refuse at once what would be refused after its input was read."""
        self._jobs.check_place()

    async def create(self, request: VideoRequest, given: InputImages) -> dict[str, Any]:
        """Start a job.

        Raises:
            OmniError, AnsweredError: there is none.
        """
        names = {"images": _INPUT, "image": _INPUT}
        if request.seconds is not None:
            names["num_frames"] = "seconds"
        if len(given.images) > 1:
            raise BadRequestError("a video starts from one picture at most", field=_INPUT)
        model = self._requests.check_request(request, request.prompt, given, _INPUT)
        params = self._params(request)
        record = VideoRecord(
            id=new_video_id(),
            created_at=int(time.time()),
            status=VideoStatus.QUEUED,
            model=model,
            prompt=request.prompt,
            size=self._size(params),
            seconds=_seconds(request, params, self._defaults()),
        )
        with self._jobs.place():
            prompt = await self._requests.load(request.prompt, given)
            await self._requests.check_prepared(Task.VIDEO, prompt, params, names)
            outputs = self._requests.run(Task.VIDEO, prompt, params, self._timeout_s, names)
            await self._jobs.create(record, outputs)
        return record.body()

    async def get(self, video_id: str) -> dict[str, Any]:
        record = await self._record(video_id)
        return record.body(self._jobs.progress(video_id))

    def poll_after_s(self, video_id: str) -> float:
        """When a client may ask for a job again."""
        return self._jobs.poll_after_s(video_id)

    async def list(self, after: str | None, limit: int, order: str) -> dict[str, Any]:
        """OpenAI's page of jobs."""
        if not 1 <= limit <= 100:
            raise BadRequestError("limit must be 1 to 100", field="limit")
        if order not in ("asc", "desc"):
            raise BadRequestError("order must be asc or desc", field="order")
        page = await self._jobs.store.page(after, limit + 1, newest_first=order == "desc")
        if page is None:
            raise BadRequestError("there is no such video", field="after")
        shown = page[:limit]
        return {
            "object": "list",
            "data": [record.body(self._jobs.progress(record.id)) for record in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(page) > limit,
        }

    async def content(self, video_id: str, variant: str) -> VideoFile:
        """A file of a video that is made.

        Raises:
            AnsweredError: 404, there is none (yet).
        """
        if variant not in tuple(Variant):
            raise BadRequestError(f"variant must be one of {', '.join(Variant)}", field="variant")
        record = await self._record(video_id)
        if record.status is VideoStatus.FAILED:
            raise _not_found(f"the video failed: {record.error_message}", "video_failed")
        if record.status is not VideoStatus.COMPLETED:
            raise _not_found("the video is not ready yet", "video_not_ready")
        files = self._jobs.store.files
        return VideoFile(files.path(video_id, Variant(variant)), files.media_type(Variant(variant)))

    async def cancel(self, video_id: str) -> dict[str, Any]:
        """Stop a job that runs.

        Raises:
            AnsweredError: 404, or 409 when it has ended.
        """
        await self._record(video_id)
        if not await self._jobs.cancel(video_id):
            raise AnsweredError(
                HttpError(
                    HTTPStatus.CONFLICT, "the video has ended", "ConflictError", "video_ended"
                )
            )
        return await self.get(video_id)

    async def delete(self, video_id: str) -> dict[str, Any]:
        """Delete a video; one that is being made is stopped first."""
        await self._record(video_id)
        await self._jobs.delete(video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}

    async def _record(self, video_id: str) -> VideoRecord:
        record = await self._jobs.store.get(video_id) if is_video_id(video_id) else None
        if record is None:
            raise _not_found("there is no such video", "video_not_found")
        return record

    def _defaults(self) -> dict[str, object]:
        known = self._requests.known
        return dict(known.defaults) if known is not None else {}

    def _params(self, request: VideoRequest) -> OmniDiffusionSamplingParams:
        num_frames = request.num_frames
        if request.seconds is not None:
            if num_frames is not None:
                raise BadRequestError("give seconds or num_frames, not both", field="num_frames")
            fps = request.fps or _int(self._defaults().get("fps")) or _DEFAULT_FPS
            known = self._requests.known
            multiple = known.frames_multiple if known is not None else 1
            num_frames = frames_for(parse_seconds(request.seconds), fps, multiple)
        names = {"num_frames": "seconds"} if request.seconds is not None else {}
        return denoise_params(request, names, num_frames=num_frames, fps=request.fps)

    def _size(self, params: OmniDiffusionSamplingParams) -> str:
        defaults = self._defaults()
        width = params.width or _int(defaults.get("width"))
        height = params.height or _int(defaults.get("height"))
        return f"{width}x{height}" if width and height else "auto"


def _seconds(
    request: VideoRequest, params: OmniDiffusionSamplingParams, defaults: dict[str, object]
) -> str:
    """As asked for; else as the model's own length has it. Empty: known when it is made."""
    if request.seconds is not None:
        return f"{parse_seconds(request.seconds):g}"
    num_frames = params.num_frames or _int(defaults.get("num_frames"))
    fps = params.fps or _int(defaults.get("fps"))
    return f"{num_frames / fps:.2f}" if num_frames and fps else ""


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _not_found(message: str, code: str) -> AnsweredError:
    return AnsweredError(
        HttpError(HTTPStatus.NOT_FOUND, message, "NotFoundError", code, "video_id")
    )
