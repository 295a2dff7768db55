"""The one shape of an error reply (server.errors builds it) and which statuses a route may answer with."""

from typing import Any

from pydantic import Field

from server.schemas.wire import WireModel


class ErrorDetail(WireModel):
    message: str = Field(max_length=65_536)
    type: str = Field(max_length=64)
    param: str | None = Field(max_length=256)
    code: str | None = Field(max_length=64)


class ErrorReply(WireModel):
    error: ErrorDetail


MEANINGS = {
    400: "The request is wrong, too long, or asks for what is not served.",
    401: "No API key, or a wrong one.",
    404: "No such model, file, job, future or route.",
    405: "The route exists, the method does not.",
    408: "The body came too slowly.",
    409: "The name of an adapter is taken, or a number or key was used for another call.",
    413: "The body is too large.",
    415: "The body has the wrong media type, or is encoded.",
    429: "A quota is used up: of files, jobs, adapters, live training models or saved weights; deleting, cancelling or "
    "unloading some helps.",
    500: "Our fault; the reply names the request id and nothing else.",
    503: "Full, starting or stopping; Retry-After says when to come back. Without it, a training call has ended so.",
    507: "The server cannot keep files or jobs: its disk is full, or its data directory cannot be used.",
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    return {status: {"model": ErrorReply, "description": MEANINGS[status]} for status in statuses}


READ_FAILURES = failures(401, 500)
BODY_FAILURES = failures(*(MEANINGS.keys() - {409, 429, 507}))
