"""What happens to every request before and after its route, in pure ASGI: its path, id, log, last resort, key.

BaseHTTPMiddleware is not used: it wraps `receive` and so hides disconnects. Must not know any route but the open ones.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable
from urllib.parse import unquote

from server.asgi import BODY_METHODS, ASGIApp, Message, Receive, Scope, Send, header, send_error, unread
from server.errors import InvalidApiKey, InvalidRequest, RequestFailedError, ServerDraining
from server.metrics import Metrics

access_log = logging.getLogger("longwave.access")
logger = logging.getLogger("longwave")

PAGE = frozenset({"/", "/web/app.js", "/web/attachments.js", "/web/style.css"})
OPEN_PATHS = PAGE | {"/health", "/health/live", "/health/ready", "/health/startup"}
POLLED = ("/health", "/metrics")  # asked every few seconds: logged when the answer is another than before
ABSOLUTE_FORM = re.compile(rb"https?://(?:[^/@]*@)?(?P<host>[^/@]+)(?P<path>/.*)?", re.IGNORECASE)
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody receives it, the access log and the metrics show it
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class OriginForm:
    """Targets in absolute form, `http://host/path`, are taken for their path, and their host for the header's, which
    every server must do: RFC 9112, 3.2.2."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        absolute = ABSOLUTE_FORM.fullmatch(scope["raw_path"]) if scope["type"] == "http" else None
        if absolute is not None:
            path = absolute["path"] or b"/"
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            headers = [(b"host", absolute["host"]), *others]
            scope = {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": headers}
        await self.app(scope, receive, send)


class RequestContext:
    """Gives each request an id and an arrival time, logs and counts its reply. Turns our bugs into a bare 500, and
    requests that are not whole when the server ends into a 503."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self._last_polled: dict[str, int] = {}  # route -> status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrival = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, arrival_time=arrival, cache_salt=b"", owner="")
        status = 0
        closing = [(b"connection", b"close")] if _has_two_lengths(scope) else []

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode()), *closing]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # uvicorn's, when the server ends and the request is still not whole
            if status:
                raise
            closing.append((b"connection", b"close"))
            await send_error(send_with_id, ServerDraining("The server is shutting down. Try again later."))
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise  # the reply has begun: all that is left is to break it off
            await send_error(send_with_id, RequestFailedError(f"The server failed. Request id: {request_id}"))
        finally:
            self._log(scope, request_id, status or CLIENT_CLOSED_REQUEST, time.monotonic() - arrival)
        return None

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.observe_http(route, scope["method"], status, seconds)
        # The route and never the raw path or query: they are the caller's text.
        level = logging.INFO
        if route.startswith(POLLED):
            level = logging.DEBUG if self._last_polled.get(route, 200) == status else logging.INFO
            self._last_polled[route] = status
        access_log.log(level, "%s %s %d %.3fs %s", scope["method"], route, status, seconds, request_id)


class NoWebSocket:
    """Says so to whoever asks for one: the answer to the plain GET would tell nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (header(scope, b"upgrade") or "").strip().lower() != "websocket":
            return await self.app(scope, receive, send)
        message = 'WebSocket is not served: send plain HTTP requests; with `"stream": true` answers come as events.'
        rest = unread(scope, receive) if scope["method"] in BODY_METHODS else None
        return await send_error(send, InvalidRequest(message), unread=rest)


class Authentication:
    """One of the API keys, on every path that is not open. The key also decides whose prefix cache is read."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        open_paths: frozenset[str] = OPEN_PATHS,
        secret: bytes | None = None,
    ) -> None:
        """`secret` makes salts of the keys: where prefixes outlive this process, it must too."""
        self.app = app
        self.open_paths = open_paths
        self._digests = [_digest(key) for key in keys]
        self._secret = secret or secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in self.open_paths:
            return await self.app(scope, receive, send)
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        presented = _digest(key.strip())
        # Every key is compared, whichever matches: the time says nothing. (All digests have one length.)
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "Incorrect API key provided." if key else "No API key: send it as `Authorization: Bearer <key>`."
            rest = unread(scope, receive) if scope["method"] in BODY_METHODS else None
            return await send_error(send, InvalidApiKey(message), unread=rest)
        scope["state"]["cache_salt"] = hmac.digest(self._secret, presented, "sha256")
        scope["state"]["owner"] = _digest(f"owner:{key.strip()}").hex()  # the same after a restart, unlike the salt
        return await self.app(scope, receive, send)


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if given is not None and REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _has_two_lengths(scope: Scope) -> bool:
    """Of its body, of which a proxy may have believed the other one: RFC 9112, 6.1, lets nothing follow on such a
    connection."""
    return None not in (header(scope, b"content-length"), header(scope, b"transfer-encoding"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()
