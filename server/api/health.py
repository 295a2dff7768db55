"""Probes. Live: a restart would not help. Ready: send work. Startup: the model is loaded. They allocate nothing."""

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from server.api.deps import LifecycleDep
from server.lifecycle import Lifecycle

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok", "unavailable"]
    phase: str = Field(max_length=16)


UNWELL = "Not (or no longer) so."
Probe = Callable[[Lifecycle], Awaitable[Response]]


def probe(path: str) -> Callable[[Probe], Probe]:
    """A route of GET, and of HEAD, which load balancers ask with: the same without the body."""

    def add(endpoint: Probe) -> Probe:
        router.get(path, response_model=Health, responses={503: {"model": Health, "description": UNWELL}})(endpoint)
        router.head(path, response_class=Response, responses={503: {"description": UNWELL}})(endpoint)
        return endpoint

    return add


@probe("/health/live")
async def live(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_live)


@probe("/health/ready")
@probe("/health")
async def ready(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_ready)


@probe("/health/startup")
async def startup(lifecycle: LifecycleDep) -> Response:
    return _reply(lifecycle, lifecycle.is_started)


def _reply(lifecycle: Lifecycle, well: bool) -> JSONResponse:
    body = {"status": "ok" if well else "unavailable", "phase": lifecycle.phase.value}
    return JSONResponse(body, status_code=200 if well else 503)
