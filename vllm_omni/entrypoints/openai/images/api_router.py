"""POST /v1/images/generations and /v1/images/edits."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.images.protocol import ImageRequest
from vllm_omni.entrypoints.openai.images.serving import EDIT, GENERATION, ImageServing
from vllm_omni.entrypoints.openai.media.forms import read_media_body
from vllm_omni.entrypoints.openai.media.image_loader import InputImages
from vllm_omni.entrypoints.openai.responses import (
    JsonAnswer,
    StreamedResponse,
    counted,
    read_json,
    until_disconnect,
)
from vllm_omni.entrypoints.openai.serving import parse_model

router = APIRouter()
_SCHEMA = ImageRequest.model_json_schema()
_JSON_BODY = {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}
_FORM_SCHEMA = {
    **_SCHEMA,
    "properties": {
        **_SCHEMA["properties"],
        "image": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "mask": {"type": "string", "format": "binary"},
    },
    "required": ["prompt", "image"],
}
_FORM_BODY = {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}}


@router.post(
    "/v1/images/generations",
    dependencies=[Depends(validate_json_request)],
    openapi_extra={"requestBody": _JSON_BODY},
    response_model=None,
)
@counted
async def generate_images(raw_request: Request) -> Response:
    """Pictures from a text."""
    serving: ImageServing = raw_request.app.state.omni_images
    serving.check_admission()
    request = parse_model(ImageRequest, await read_json(raw_request))
    return await _answer(raw_request, serving, GENERATION, request, InputImages())


@router.post("/v1/images/edits", openapi_extra={"requestBody": _FORM_BODY}, response_model=None)
@counted
async def edit_images(raw_request: Request) -> Response:
    """Pictures from a text and other pictures: a form with files, or JSON with data URLs."""
    serving: ImageServing = raw_request.app.state.omni_images
    serving.check_admission()
    body = await read_media_body(raw_request, raw_request.app.state.omni.limits)
    given = body.take_images("image", "images", mask="mask")
    request = body.parse(ImageRequest)
    return await _answer(raw_request, serving, EDIT, request, given)


async def _answer(
    raw_request: Request,
    serving: ImageServing,
    kind: str,
    request: ImageRequest,
    given: InputImages,
) -> Response:
    if request.stream:
        stream = await until_disconnect(raw_request, serving.start(kind, request, given))
        return StreamedResponse(stream.events, source=stream.source, media_type="text/event-stream")
    return JsonAnswer(await until_disconnect(raw_request, serving.create(kind, request, given)))
