"""POST /v1/completions."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.completions.serving import OmniServingCompletion
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
    "/v1/completions",
    dependencies=[Depends(validate_json_request)],
    openapi_extra={"requestBody": _BODY},
    response_model=None,
)
@counted
async def create_completion(raw_request: Request) -> Response:
    """Continue a text."""
    serving: OmniServingCompletion = raw_request.app.state.openai_serving_completion
    serving.engine_client.check_admission(1)
    body = await read_json(raw_request)
    answer = await until_disconnect(raw_request, serving.create(body, raw_request))
    if isinstance(answer, CompletionResponse):
        return JsonAnswer(answer.model_dump())
    interval = float(raw_request.app.state.args.sse_keep_alive_interval)
    return StreamedResponse(
        with_sse_keep_alive(answer.events, interval),
        source=answer.scope,
        media_type="text/event-stream",
    )
