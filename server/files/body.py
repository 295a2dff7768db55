"""The bodies that are not buffered, in pure ASGI: uploads pass piece by piece, bounded in size, pauses, pace and time.

Must not know what is in them. server.body_limit buffers every other body."""

import asyncio

from server.asgi import ASGIApp, Incoming, Message, Receive, Scope, Send, discard, header, send_error, unread
from server.errors import LongwaveError, PayloadTooLarge, RequestTimeout, UnsupportedMediaType

FORM_BYTES = 64 * 2**10  # what a multipart body may have beside the file
MIN_PACE = 4 * 2**10  # bytes a second: a place among the uploads is not kept by dripping


class StreamedBody:
    """A route that reads as it goes may refuse in the middle: it replies, and the rest is still taken in a while."""

    def __init__(self, app: ASGIApp, paths: frozenset[str], max_file_bytes: int, pause: float, timeout: float) -> None:
        """`pause`: seconds without a byte, and those beyond what MIN_PACE would have taken for what has come;
        `timeout`: seconds of the whole body."""
        self.app = app
        self.paths = paths
        self.max_file_bytes = max_file_bytes
        self.pause = pause
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.paths:
            return await self.app(scope, receive, send)
        try:
            self._check_headers(scope)
        except LongwaveError as error:
            return await send_error(send, error, unread=unread(scope, receive))
        incoming = Incoming(receive)
        rest = _Rest(scope, incoming)
        return await self.app(scope, self._bounded(incoming, rest), rest.replying(send))

    def _check_headers(self, scope: Scope) -> None:
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise UnsupportedMediaType("Encoded request bodies (gzip and others) are not accepted.")
        media_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if media_type != "multipart/form-data":
            raise UnsupportedMediaType("A file is uploaded as `Content-Type: multipart/form-data`.")
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_file_bytes + FORM_BYTES:
            raise self._too_large()

    def _bounded(self, incoming: Incoming, rest: "_Rest") -> Receive:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout
        size = 0
        waited = 0.0  # for the client: what the disk takes is not its fault

        async def receive() -> Message:
            nonlocal size, waited
            if incoming.complete:
                return await incoming()
            rest.asked = True
            asked_at = loop.time()
            patience = self.pause + min(0.0, size / MIN_PACE - waited)
            try:
                async with asyncio.timeout_at(min(deadline, asked_at + patience)):
                    message = await incoming()
            except TimeoutError:
                raise RequestTimeout("The request body came too slowly.") from None
            waited += loop.time() - asked_at
            size += len(message.get("body", b""))
            if size > self.max_file_bytes + FORM_BYTES:
                raise self._too_large()
            return message

        return receive

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The file is larger than {self.max_file_bytes} bytes.", param="file")


class _Rest:
    """What the route left unread when it replied."""

    def __init__(self, scope: Scope, incoming: Incoming) -> None:
        self.asked = False  # whether the client was told to go on (`Expect: 100-continue`)
        self._scope = scope
        self._incoming = incoming

    def replying(self, send: Send) -> Send:
        closing = False

        async def reply(message: Message) -> None:
            nonlocal closing
            if message["type"] == "http.response.start" and not self._incoming.complete:
                closing = True
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not (closing and last):
                return await send(message)
            await send({**message, "more_body": True})
            await discard(self._incoming if self.asked else unread(self._scope, self._incoming))
            return await send({"type": "http.response.body", "body": b""})

        return reply
