"""A job's events as server-sent events, ended when the job ends. Must not know what the events say.

`id:` lines are the events' ids: a client that comes back with `Last-Event-ID` misses nothing. `[DONE]` comes after the
last event of a job that has ended, and never otherwise.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.disconnect import ClientDisconnected, until_disconnect
from server.api.sse import DONE, HEADERS, PING, STALL_LIMIT
from server.equal_parts import EqualParts
from server.errors import LongwaveError, ServerDraining, ServerOverloaded
from server.finetune import Event
from server.schemas.fine_tuning_reply import FineTuningJobEvent

MAX_STREAMS = 64

logger = logging.getLogger("longwave")


class EventFeeds:
    """How many are open: each of them asks the store every second."""

    def __init__(self) -> None:
        self._open = EqualParts(MAX_STREAMS)

    @property
    def num_open(self) -> int:
        return self._open.held

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Of one of them, taken before the store is first asked. Raises ServerOverloaded."""
        if not self._open.has_room(owner, 1):
            raise ServerOverloaded("The server is sending too many streams of events. Try again later.")
        self._open.hold(owner, 1)
        try:
            yield
        finally:
            self._open.hold(owner, -1)


class EventFeed(Response):
    def __init__(
        self,
        place: ExitStack,
        events: AsyncIterator[Event | None],
        is_draining: Callable[[], bool],
        ping_interval: float,
    ) -> None:
        """`place` is given back at the end, or when nobody has this any more."""
        self.place = place
        self.events = events
        self.is_draining = is_draining
        self.ping_interval = ping_interval
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self.place:
            try:
                await until_disconnect(receive, self._write(send))
            except ClientDisconnected:
                pass
            except TimeoutError:
                logger.warning("a client stopped reading: its events are cut")

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._texts()) as texts:
            async for text in texts:
                async with asyncio.timeout(STALL_LIMIT):
                    await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncGenerator[bytes, None]:
        yield PING  # the headers alone would wait in some proxies
        spoke = time.monotonic()
        try:
            async for event in self.events:
                if event is not None:
                    yield f"id: {event.id}\ndata: {FineTuningJobEvent.of(event).model_dump_json()}\n\n".encode()
                    spoke = time.monotonic()
                elif self.is_draining():
                    raise ServerDraining("The server is shutting down. Come back with Last-Event-ID.")
                elif time.monotonic() - spoke >= self.ping_interval:
                    yield PING
                    spoke = time.monotonic()
        except LongwaveError as error:
            yield f"data: {json.dumps(error.body())}\n\n".encode()
            return
        yield DONE
