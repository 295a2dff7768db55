"""A request's body before its route: whole, bounded in size, in time and in sum, JSON and not encoded, or refused. Must
not know any route but by its path."""

import asyncio
from collections.abc import Callable
from functools import partial

from server.asgi import BODY_METHODS, ASGIApp, Incoming, Message, Receive, Scope, Send, header, send_error, unread
from server.equal_parts import EqualParts
from server.errors import LongwaveError, PayloadTooLarge, RequestTimeout, ServerOverloaded, UnsupportedMediaType

BUFFERED_BODIES = 8  # bodies of full size that may be in memory before they reach admission
SMALL_BODY = 64 * 2**10  # bytes that always have room: uvicorn holds as many for any connection that sends


class BodyLimit:
    """Reads the whole body before the route runs: bounded in size, in time and in sum; JSON and not encoded. A POST to
    one of the `streamed` paths passes: somebody else bounds it.

    Large bodies that stall, of which 8 take all of the sum, hold up no small one, and no tenant's but their own. So it
    has to know whose they are, and comes after authentication."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, streamed: frozenset[str] = frozenset()) -> None:
        self.app = app
        self.streamed = streamed
        self.max_bytes = max_bytes
        self.timeout = timeout
        self._buffered = EqualParts(BUFFERED_BODIES * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            return await self.app(scope, receive, send)
        if scope["method"] == "POST" and scope.get("path") in self.streamed:
            return await self.app(scope, receive, send)
        incoming = Incoming(receive)
        tenant: bytes = scope["state"]["cache_salt"]
        body = _Body(incoming, partial(self._buffered.hold, tenant))
        try:
            refusal = await self._read(scope, incoming, body, tenant)
            if refusal is not None:
                body.give_back()
                await send_error(send, refusal, unread=None if incoming.complete else unread(scope, incoming))
            elif body.is_whole:
                await self.app(scope, body.replay, send)
        finally:
            body.give_back()
        return None

    async def _read(self, scope: Scope, incoming: Incoming, body: "_Body", tenant: bytes) -> LongwaveError | None:
        """Why it is refused. One that is not whole then has no client any more: nobody is left to answer."""
        try:
            self._check_headers(scope)
            async with asyncio.timeout(self.timeout):
                await self._take(incoming, body, tenant)
            _check_type(scope, body)
        except TimeoutError:
            return RequestTimeout("The request body came too slowly.")
        except LongwaveError as error:
            return error
        return None

    def _check_headers(self, scope: Scope) -> None:
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise UnsupportedMediaType("Encoded request bodies (gzip and others) are not accepted.")
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large()

    async def _take(self, incoming: Incoming, body: "_Body", tenant: bytes) -> None:
        while not body.is_whole:
            message = await incoming()
            if message["type"] == "http.disconnect":
                return
            chunk = message.get("body", b"")
            size = body.size + len(chunk)
            if size > self.max_bytes:
                raise self._too_large()
            if size > SMALL_BODY and not self._buffered.has_room(tenant, len(chunk)):
                raise ServerOverloaded("The server is reading too many large requests. Try again later.")
            body.add(chunk, is_last=not message.get("more_body", False))

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request body is larger than {self.max_bytes} bytes.")


class _Body:
    """What has come of one. It counts among all that are in memory until its route asks for what comes after it, which
    is when it has been read and a client that leaves is looked out for, or until the route has ended."""

    def __init__(self, receive: Receive, count: Callable[[int], None]) -> None:
        self.size = 0  # of what counts
        self.is_whole = False
        self._receive = receive
        self._count = count
        self._chunks: list[bytes] = []
        self._handed_on = False

    def add(self, chunk: bytes, *, is_last: bool) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk)
        self.is_whole = is_last
        self._count(len(chunk))

    def give_back(self) -> None:
        self._count(-self.size)
        self.size = 0
        self._chunks.clear()

    async def replay(self) -> Message:
        """The whole body as one message, then whatever comes: a disconnect."""
        if self._handed_on:
            self.give_back()
            return await self._receive()
        self._handed_on = True
        whole, self._chunks = b"".join(self._chunks), []
        return {"type": "http.request", "body": whole, "more_body": False}


def _check_type(scope: Scope, body: _Body) -> None:
    """Of a POST: no route takes a body by another method, so those are the router's to refuse, whatever they hold."""
    media_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if body.size and scope["method"] == "POST" and media_type != "application/json":
        raise UnsupportedMediaType("The request body must be JSON: send `Content-Type: application/json`.")
