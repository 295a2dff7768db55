"""GET /metrics: Prometheus."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from server.api.deps import LifecycleDep
from server.metrics import CONTENT_TYPE
from server.schemas.failure import READ_FAILURES

router = APIRouter(tags=["metrics"])


TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


@router.get("/metrics", response_class=Response, responses=READ_FAILURES | TEXT)
async def metrics(lifecycle: LifecycleDep) -> PlainTextResponse:
    return PlainTextResponse(lifecycle.metrics.render(), headers={"content-type": CONTENT_TYPE})
