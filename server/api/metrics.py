"""GET /metrics: Prometheus."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from server.api.deps import LifecycleDep
from server.daemon_thread import in_daemon_thread
from server.metrics import CONTENT_TYPE
from server.schemas.failure import READ_FAILURES

router = APIRouter(tags=["metrics"])


TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


@router.get("/metrics", response_class=Response, responses=READ_FAILURES | TEXT)
async def metrics(lifecycle: LifecycleDep) -> PlainTextResponse:
    # A thread of its own: clients make a megabyte of it, and it is wanted most when others wait for a disk.
    text = await in_daemon_thread(lifecycle.metrics.render)
    return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})
