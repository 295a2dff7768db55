"""How slowly an upload may come, on a clock of the test's own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from server.asgi import Message, Receive, Scope, Send
from server.errors import RequestTimeout
from server.files.body import MIN_PACE, StreamedBody

PAUSE, WHOLE = 30.0, 3600.0
GAP = 29.0  # seconds between two messages
HEADERS = [(b"content-type", b"multipart/form-data; boundary=cut")]


class SteeredLoop(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now

    async def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):  # for a timer that is due, and for what it wakes
            await asyncio.sleep(0)


Route = Callable[[SteeredLoop, Receive], Awaitable[None]]


def uploading(piece: bytes, route: Route) -> float:
    """Seconds until `route` ended, to which a piece comes in every GAP. Raises what it raises."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteeredLoop)

        async def receive() -> Message:
            await loop.pass_by(GAP)
            return {"type": "http.request", "body": piece, "more_body": True}

        async def send(_: Message) -> None:
            raise AssertionError("the route sends nothing")

        async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
            await route(loop, receive)

        body = StreamedBody(app, frozenset({"/"}), 2**30, pause=PAUSE, timeout=WHOLE)
        await body({"type": "http", "method": "POST", "path": "/", "headers": HEADERS}, receive, send)
        return loop.now

    with asyncio.Runner(loop_factory=SteeredLoop) as runner:
        return runner.run(main())


async def read(_loop: SteeredLoop, receive: Receive) -> None:
    with contextlib.suppress(RequestTimeout):
        while True:
            await receive()


async def write_slowly(loop: SteeredLoop, receive: Receive) -> None:
    for _ in range(20):
        await receive()
        await loop.pass_by(4 * GAP)


@pytest.mark.parametrize("num_bytes", [1, int(MIN_PACE * GAP / 2)], ids=["a byte", "half the pace"])
def test_an_upload_that_drips_is_ended(num_bytes: int) -> None:
    assert uploading(b"x" * num_bytes, read) <= 4 * GAP


def test_an_upload_that_keeps_the_pace_has_all_of_its_time() -> None:
    assert uploading(b"x" * int(MIN_PACE * GAP), read) >= WHOLE


def test_time_that_the_server_takes_is_not_the_clients() -> None:
    assert uploading(b"x" * int(MIN_PACE * GAP), write_slowly) == 20 * 5 * GAP
