"""POST /v1/chat/completions of a picture model."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.image_chat.serving import ImageChatServing
from vllm_omni.entrypoints.openai.responses import (
    JsonAnswer,
    StreamedResponse,
    counted,
    read_json,
    until_disconnect,
)

router = APIRouter()
_BODY = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    openapi_extra={"requestBody": _BODY},
    response_model=None,
)
@counted
async def create_chat_completion(raw_request: Request) -> Response:
    """Answer a message with pictures."""
    serving: ImageChatServing = raw_request.app.state.omni_image_chat
    serving.check_admission()
    chat = serving.begin(await read_json(raw_request))
    if chat.stream:
        chunks = await until_disconnect(raw_request, serving.start(chat))
        return StreamedResponse(chunks, source=chat.outputs, media_type="text/event-stream")
    return JsonAnswer(await until_disconnect(raw_request, serving.answer(chat)))
