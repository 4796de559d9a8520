"""GET /v1/omni/replicas, POST /v1/omni/replicas/{stage}/{replica}/restart and .../drain."""

from http import HTTPStatus

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse

from vllm_omni.entrypoints.openai.admin.serving import AdminServing


def _authorize(raw_request: Request) -> None:
    _admin(raw_request).authorize(raw_request.headers)


def _admin(raw_request: Request) -> AdminServing:
    admin: AdminServing = raw_request.app.state.omni_admin
    return admin


router = APIRouter(dependencies=[Depends(_authorize)])


@router.get("/v1/omni/replicas")
async def list_replicas(raw_request: Request) -> JSONResponse:
    """Every replica of every stage."""
    return JSONResponse(_admin(raw_request).replicas())


@router.post("/v1/omni/replicas/{stage}/{replica}/restart")
async def restart_replica(stage: str, replica: int, raw_request: Request) -> JSONResponse:
    """Start a replica anew; one that serves is drained first. Answers before it is done."""
    status = await _admin(raw_request).act("restart", stage, replica)
    return JSONResponse(status, HTTPStatus.ACCEPTED)


@router.post("/v1/omni/replicas/{stage}/{replica}/drain")
async def drain_replica(stage: str, replica: int, raw_request: Request) -> JSONResponse:
    """Let a replica finish what it has and keep it down. Answers before it is done."""
    status = await _admin(raw_request).act("drain", stage, replica)
    return JSONResponse(status, HTTPStatus.ACCEPTED)
