"""GET /metrics: Prometheus."""

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from server.api.deps import LifecycleDep
from server.metrics import CONTENT_TYPE
from server.schemas.failure import READ_FAILURES

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=PlainTextResponse, responses=READ_FAILURES)
async def metrics(lifecycle: LifecycleDep) -> PlainTextResponse:
    return PlainTextResponse(lifecycle.metrics.render(), headers={"content-type": CONTENT_TYPE})
