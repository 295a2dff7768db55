"""Probes. Live: a restart would not help. Ready: send work. Startup: the model is loaded. They allocate nothing."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from server.api.deps import LifecycleDep
from server.lifecycle import Lifecycle

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok", "unavailable"]
    phase: str = Field(max_length=16)


UNWELL: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not (or no longer) so."}}


@router.get("/health/live", response_model=Health, responses=UNWELL)
async def live(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_live)


@router.get("/health/ready", response_model=Health, responses=UNWELL)
@router.get("/health", response_model=Health, responses=UNWELL)
async def ready(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_ready)


@router.get("/health/startup", response_model=Health, responses=UNWELL)
async def startup(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_started)


def _reply(lifecycle: Lifecycle, well: bool) -> JSONResponse:
    body = {"status": "ok" if well else "unavailable", "phase": lifecycle.phase.value}
    return JSONResponse(body, status_code=200 if well else 503)
