"""GET /v1/models and GET /v1/models/{id}."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from vllm_omni.entrypoints.openai.models.serving import OmniModels

router = APIRouter()


@router.get("/v1/models")
async def list_models(raw_request: Request) -> JSONResponse:
    """The served names."""
    models: OmniModels = raw_request.app.state.omni_models
    return JSONResponse(await models.list())


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, raw_request: Request) -> JSONResponse:
    """One served name."""
    models: OmniModels = raw_request.app.state.omni_models
    return JSONResponse(await models.retrieve(model_id))
