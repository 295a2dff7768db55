"""Every exception of a route -> OpenAI's error reply. server.errors knows the replies; this finds the right one."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from server.api.disconnect import ClientDisconnected
from server.engine.token_ids import TokenIds
from server.errors import InvalidRequest, LongwaveError, MethodNotAllowed, RouteNotFound, UnsupportedParameter
from server.middleware import CLIENT_CLOSED_REQUEST
from server.schemas.wire import UNSUPPORTED, UNSUPPORTED_PART

MAX_PARAM_CHARACTERS = 256
FOR_TEXT = "For text there are /v1/chat/completions and /v1/completions."
#: OpenAI's routes, with all below them -> what there is instead.
NOT_SERVED = dict.fromkeys(
    (
        f"/v1/{name}"
        for name in (
            "assistants", "audio", "batches", "containers", "embeddings", "evals", "images", "moderations", "responses",
            "threads", "vector_stores",
        )
    ),
    FOR_TEXT,
) | {
    "/v1/uploads": "Files are sent whole, to /v1/files.",
    "/v1/fine_tuning/checkpoints": "Fine-tuning has /v1/fine_tuning/jobs.",
    "/v1/fine_tuning/alpha": "Fine-tuning has /v1/fine_tuning/jobs.",
}  # fmt: skip
WANTED = "Input should be "
NOTHING: tuple[Any, ...] = ("", [], {})  # accepted for what is not served, and not worth telling
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def install(app: FastAPI, turned_off: Mapping[str, str]) -> None:
    """`turned_off`: more routes that are not served, with all below them -> why."""
    app.state.not_served = {**turned_off, **NOT_SERVED}
    app.add_exception_handler(LongwaveError, _on_longwave_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)


def _reply(error: LongwaveError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers={**error.headers(), **(headers or {})})


async def _on_longwave_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LongwaveError)
    return _reply(error)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _reply(RouteNotFound(_why_not_found(request.url.path, request.app.state.not_served)))
    if error.status_code == 405:
        allowed = ", ".join(sorted(_allowed(request)))
        return _reply(MethodNotAllowed(f"Not allowed to {request.method} on this URL."), {"allow": allowed})
    return _reply(InvalidRequest(str(error.detail), status=error.status_code))


def _why_not_found(path: str, not_served: Mapping[str, str]) -> str:
    for route, instead in not_served.items():
        if f"{path}/".startswith(f"{route}/"):
            return f"{route} is not served here. {instead}"
    return "Unknown request URL. Please check it for typos; OpenAI's routes are under /v1."


def _allowed(request: Request) -> set[str]:
    """The methods of all routes of this URL: the framework's error knows those of one."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    routes = request.app.routes
    return {name for name, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in routes)}


def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _reply(invalid_request(error.errors(), error.body))


def invalid_request(details: Any, body: Any) -> InvalidRequest:
    """The most telling of pydantic's complaints: a field that is not served; else of a union's branches the one whose
    JSON type is the body's, if there is one, and of several the one that came furthest into the body: deepest,
    and there past most items. What all branches want in one place is told together."""
    for detail in details:
        if detail["type"] == UNSUPPORTED:
            param = _spell([*_path(detail, body), detail["ctx"]["name"]])
            accepted = _or([json.dumps(value) for value in detail["ctx"]["neutral"] if value not in NOTHING])
            rest = f", except as {accepted}" if accepted else ""
            return UnsupportedParameter(f"Unsupported parameter: '{param}' is not served here{rest}.", param=param)
        if detail["type"] == UNSUPPORTED_PART:
            text = f"Content parts of type '{detail['ctx']['kind']}' are not served: text only."
            return UnsupportedParameter(text, param=_spell(_path(detail, body)))
    paths = [(_path(detail, body), detail) for detail in details]
    path, detail = max(paths, key=lambda pair: (not pair[1]["type"].endswith("_type"), len(pair[0]), _items(pair[0])))
    param = _spell(path)
    together = _alternatives([other for place, other in paths if place == path])
    if _wants(detail) and len(together) > 1:
        said = f"{WANTED}{_or(together)}"
        return InvalidRequest(f"Invalid value for '{param}': {said}." if param else f"{said}.", param=param)
    return InvalidRequest(_message(detail, param), param=param)


def _items(path: list[str | int]) -> list[int]:
    return [step for step in path if isinstance(step, int)]


def _or(several: list[str]) -> str:
    """a, b or c"""
    return " or ".join(part for part in (", ".join(several[:-1]), *several[-1:]) if part)


def _alternatives(details: list[Any]) -> list[str]:
    """What a union's branches want, in their order and once each: "a valid integer", "'auto'"."""
    return list(dict.fromkeys(detail["msg"].removeprefix(WANTED) for detail in details if _wants(detail)))


def _wants(detail: Any) -> bool:
    """Whether it is about a JSON value's type or words, and names no class of ours."""
    kind = detail["type"]
    told = kind == "literal_error" or (kind.endswith("_type") and not kind.startswith("model_"))
    return told and detail["msg"].startswith(WANTED) and not isinstance(detail["input"], TokenIds)


def _path(detail: Any, body: Any) -> list[str | int]:
    """The error's place without "body" and without pydantic's names of union branches, which are no place."""
    if detail["loc"][0] != "body":  # a query's or path's parameter: nothing is inside it
        return list(detail["loc"][1:2])
    path: list[str | int] = []
    place = body
    for at, step in enumerate(detail["loc"][1:], start=2):
        if _has(place, step):
            place = place[step]
            path.append(step)
        elif at == len(detail["loc"]) and detail["type"] == "missing":
            path.append(step)
    return path


def _has(place: Any, step: str | int) -> bool:
    if isinstance(place, dict):
        return step in place
    return isinstance(place, list) and isinstance(step, int) and step < len(place)


def _spell(path: list[str | int]) -> str | None:
    """messages[0].content"""
    spelled = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    return spelled[:MAX_PARAM_CHARACTERS] or None


def _message(detail: Any, param: str | None) -> str:
    kind = detail["type"]
    if kind == "json_invalid":
        return f"We could not parse the JSON body of your request: {detail['ctx']['error']}."
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}"
    if kind == "missing":
        return f"Missing required parameter: '{param}'." if param else "The request body is missing."
    if param is None and kind == "model_attributes_type":
        return "The request body must be a JSON object."
    if kind == "list_type" and isinstance(detail["input"], TokenIds):
        return f"Invalid value for '{param}': List should have fewer items than {len(detail['input'])}."
    said = detail["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return f"Invalid value for '{param}': {said}." if param else f"Invalid request: {said}."
