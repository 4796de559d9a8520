"""POST /v1/chat/completions."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.chat.serving import OmniServingChat
from vllm_omni.entrypoints.openai.responses import counted
from vllm_omni.entrypoints.openai.text_answers import JSON_BODY, answer_text

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    openapi_extra=JSON_BODY,
    response_model=None,
)
@counted
async def create_chat_completion(raw_request: Request) -> Response:
    """Answer a conversation in text, in audio, or in both."""
    serving: OmniServingChat = raw_request.app.state.openai_serving_chat
    return await answer_text(raw_request, serving.create)
