"""What happens to every request before and after its route, in pure ASGI: id, log, last resort, key, body.

BaseHTTPMiddleware is not used: it wraps `receive` and so hides disconnects. Must not know any route but the open ones.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from server.errors import (
    InvalidApiKey,
    LongwaveError,
    PayloadTooLarge,
    RequestFailedError,
    RequestTimeout,
    ServerOverloaded,
    UnsupportedMediaType,
)
from server.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

access_log = logging.getLogger("longwave.access")
logger = logging.getLogger("longwave")

OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/startup", "/", "/web/app.js", "/web/style.css"}
)
POLLED = ("/health", "/metrics")  # asked every few seconds: logged when they say no
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
BUFFERED_BODIES = 8  # bodies of full size that may be in memory before they reach admission
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 * 2**20  # how long a refused body is still taken in, and thrown away
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def send_error(send: Send, error: LongwaveError, *, unread: Receive | None = None) -> None:
    """`unread`: where the rest of the request's body comes from, when it was not read; the connection then closes."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    if unread is not None:
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": unread is not None})
    if unread is not None:
        await discard(unread)
        await send({"type": "http.response.body", "body": b""})


async def discard(receive: Receive) -> None:
    """What a client is still sending, for a while: closing on unread bytes resets the connection, and the client may
    lose the reply that tells it why."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while size < LINGER_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):  # a disconnect has none either
                    return


class RequestContext:
    """Gives each request an id and an arrival time, logs and counts its reply, and turns our bugs into a bare 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrival = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, arrival_time=arrival, cache_salt=b"", owner="")
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise  # the reply has begun: all that is left is to break it off
            await send_error(send_with_id, RequestFailedError(f"The server failed. Request id: {request_id}"))
        finally:
            self._log(scope, request_id, status, time.monotonic() - arrival)
        return None

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.observe_http(route, scope["method"] if route != "unmatched" else "any", status, seconds)
        # The route and never the raw path or query: they are the caller's text.
        level = logging.DEBUG if route.startswith(POLLED) and status < 400 else logging.INFO
        access_log.log(level, "%s %s %d %.3fs %s", scope["method"], route, status, seconds, request_id)


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


class BodyLimit:
    """Reads the whole body before the route runs: bounded in size, in time and in sum; JSON and not encoded. A POST to
    one of the `streamed` paths passes: somebody else bounds it."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, streamed: frozenset[str] = frozenset()) -> None:
        self.app = app
        self.streamed = streamed
        self.max_bytes = max_bytes
        self.timeout = timeout
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            return await self.app(scope, receive, send)
        if scope["method"] == "POST" and scope.get("path") in self.streamed:
            return await self.app(scope, receive, send)
        chunks: list[bytes] = []
        incoming = Incoming(receive)
        try:
            body = await self._body(scope, incoming, chunks)
            if isinstance(body, LongwaveError):
                await send_error(send, body, unread=None if incoming.complete else unread(scope, incoming))
            elif body is not None:
                await self.app(scope, _replay(body, receive), send)
        finally:
            self._buffered -= sum(map(len, chunks))
        return None

    async def _body(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> bytes | LongwaveError | None:
        """None when the client went away: nobody is left to answer."""
        try:
            self._check_headers(scope)
            async with asyncio.timeout(self.timeout):
                complete = await self._read(receive, chunks)
            body = b"".join(chunks)
            _check_type(scope, body)
        except TimeoutError:
            return RequestTimeout("The request body came too slowly.")
        except LongwaveError as error:
            return error
        return body if complete else None

    def _check_headers(self, scope: Scope) -> None:
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise UnsupportedMediaType("Encoded request bodies (gzip and others) are not accepted.")
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large()

    async def _read(self, receive: Receive, chunks: list[bytes]) -> bool:
        """False when the client went away."""
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(chunk)
            if size > self.max_bytes:
                raise self._too_large()
            if self._buffered + len(chunk) > BUFFERED_BODIES * self.max_bytes:
                raise ServerOverloaded("The server is reading too many large requests. Try again later.")
            chunks.append(chunk)
            self._buffered += len(chunk)
        return True

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request body is larger than {self.max_bytes} bytes.")


class Incoming:
    """A `receive` that knows whether the whole body has come, or nobody is left to send it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.complete = not message.get("more_body", False)
        return message


def unread(scope: Scope, receive: Receive) -> Receive:
    """The rest of the body; nothing where the client waits to be asked for it (`Expect: 100-continue`)."""
    return receive if header(scope, b"expect") is None else _nothing


async def _nothing() -> Message:
    return {"type": "http.request"}


def _check_type(scope: Scope, body: bytes) -> None:
    media_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if body and media_type != "application/json":
        raise UnsupportedMediaType("The request body must be JSON: send `Content-Type: application/json`.")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The whole body as one message, then whatever comes: a disconnect."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if given is not None and REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()
