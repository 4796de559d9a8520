"""POST /v1/audio/transcriptions."""

from typing import Annotated

from fastapi import APIRouter, Form, Request, UploadFile
from starlette.responses import PlainTextResponse, Response
from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
    TranscriptionResponseVariant,
)

from vllm_omni.entrypoints.openai.responses import (
    JsonAnswer,
    StreamedResponse,
    counted,
    until_disconnect,
)
from vllm_omni.entrypoints.openai.transcriptions.protocol import check_form, check_request
from vllm_omni.entrypoints.openai.transcriptions.serving import OmniServingTranscription
from vllm_omni.entrypoints.openai.transcriptions.subtitles import to_srt, to_vtt
from vllm_omni.errors import BadRequestError

router = APIRouter()
_SUBTITLES = {"srt": to_srt, "vtt": to_vtt}


@router.post("/v1/audio/transcriptions", response_model=None)
@counted
async def create_transcription(
    raw_request: Request, request: Annotated[TranscriptionRequest, Form()]
) -> Response:
    """The words of a recording."""
    serving: OmniServingTranscription | None = raw_request.app.state.openai_serving_transcription
    if serving is None:
        raise BadRequestError("this model does not transcribe", field="model")
    check_form(await raw_request.form())
    check_request(request)
    data = await _read(request.file, serving.limits.max_bytes)
    wanted = request.response_format
    if wanted in _SUBTITLES:
        if request.stream:
            raise BadRequestError(f"{wanted} is not streamed", field="stream")
        request.response_format = "verbose_json"
    answer = await until_disconnect(raw_request, serving.create(data, request, raw_request))
    if not isinstance(answer, TranscriptionResponseVariant):
        return StreamedResponse(answer.events, source=answer.scope, media_type="text/event-stream")
    if wanted == "text":
        return PlainTextResponse(f"{answer.text}\n")
    if wanted in _SUBTITLES:
        return PlainTextResponse(_SUBTITLES[wanted](answer.segments or []))
    return JsonAnswer(answer.model_dump())


async def _read(file: UploadFile, max_bytes: int) -> bytes:
    """The uploaded bytes; the form parser has put them into a file already."""
    if file.size is None or file.size > max_bytes:
        raise BadRequestError(f"the file is larger than {max_bytes} bytes", field="file")
    data = await file.read(max_bytes + 1)
    if not data:
        raise BadRequestError("the file is empty", field="file")
    return data
