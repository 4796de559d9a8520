"""GET /health and GET /ping. Open routes: they read state and do no work."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from vllm_omni.entrypoints.openai.health.serving import HealthReport, health_of

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(raw_request: Request) -> JSONResponse:
    """200 when every stage has a live replica, else 503 with the stages that have none."""
    report: HealthReport = health_of(raw_request.app.state.omni)
    return JSONResponse(report.body(), 200 if report.error is None else 503)
