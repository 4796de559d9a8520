"""POST /v1/audio/speech."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.responses import (
    StreamedResponse,
    counted,
    read_json,
    until_disconnect,
)
from vllm_omni.entrypoints.openai.serving import parse_model
from vllm_omni.entrypoints.openai.speech.protocol import SpeechRequest
from vllm_omni.entrypoints.openai.speech.serving import SpeechServing

router = APIRouter()
_SCHEMA = SpeechRequest.model_json_schema()
_BODY = {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}


@router.post(
    "/v1/audio/speech",
    dependencies=[Depends(validate_json_request)],
    openapi_extra={"requestBody": _BODY},
    response_model=None,
)
@counted
async def create_speech(raw_request: Request) -> Response:
    """Speak a text."""
    serving: SpeechServing = raw_request.app.state.omni_speech
    request = parse_model(SpeechRequest, await read_json(raw_request))
    speech = await until_disconnect(raw_request, serving.start(request))
    if request.stream_format == "sse":
        return StreamedResponse(
            serving.events(speech), source=speech.outputs, media_type="text/event-stream"
        )
    if request.stream_format is None and speech.form.needs_length:
        data = await until_disconnect(raw_request, serving.file(speech))
        return Response(data, media_type=speech.form.media_type)
    return StreamedResponse(
        serving.stream(speech),
        source=speech.outputs,
        media_type=speech.form.media_type,
        headers={"X-Sample-Rate": str(speech.sample_rate_hz)},
    )
