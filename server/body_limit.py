"""A request's body before its route: whole, bounded in size, in time and in sum, JSON and not encoded, or refused. Must
not know any route but by its path."""

import asyncio

from server.asgi import BODY_METHODS, ASGIApp, Incoming, Message, Receive, Scope, Send, header, send_error, unread
from server.errors import LongwaveError, PayloadTooLarge, RequestTimeout, ServerOverloaded, UnsupportedMediaType

BUFFERED_BODIES = 8  # bodies of full size that may be in memory before they reach admission


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
