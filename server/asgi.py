"""Pure ASGI's words and what is done with them everywhere: a header, an error as a reply, the rest of a body. Must not
know any route."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from server.errors import LongwaveError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 * 2**20  # how long a refused body is still taken in, and thrown away


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
