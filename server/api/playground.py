"""The playground page and its three files. They hold no secret, so they are served without a key."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

WEB = files("server") / "web"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _file(name: str, media_type: str) -> Response:
    return Response((WEB / name).read_bytes(), media_type=media_type, headers=HEADERS)


@router.get("/")
async def page() -> Response:
    return _file("index.html", "text/html")


@router.get("/web/app.js")
async def script() -> Response:
    return _file("app.js", "text/javascript")


@router.get("/web/attachments.js")
async def attachments() -> Response:
    return _file("attachments.js", "text/javascript")


@router.get("/web/style.css")
async def style() -> Response:
    return _file("style.css", "text/css")
