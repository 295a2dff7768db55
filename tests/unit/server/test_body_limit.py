"""How many bytes of bodies may be in memory, and until when they count."""

import asyncio
import json
import socket
import sys
from contextlib import ExitStack

import pytest
from scripted_engine import Script, live_server, wait_until

from server.asgi import Message, Receive, Scope, Send
from server.body_limit import BUFFERED_BODIES, BodyLimit

SIZE = 1024


class Clients:
    """They send bodies of full size in two parts, to a route that reads them and waits before it looks for the end."""

    def __init__(self) -> None:
        self.limit = BodyLimit(self._route, max_bytes=SIZE, timeout=60)
        self.read = asyncio.Event()
        self.gone = asyncio.Event()
        self.refused: list[int] = []
        self.num_answering = 0
        self.references = 0  # to a body, when it was read
        self._asking: list[asyncio.Task[None]] = []

    async def ask(self, times: int) -> None:
        self._asking += [asyncio.create_task(self._ask()) for _ in range(times)]
        for _ in range(20):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self.read.set()
        self.gone.set()
        await asyncio.gather(*self._asking)

    async def _ask(self) -> None:
        parts = [(b"x" * (SIZE // 2), True), (b"y" * (SIZE // 2), False)]

        async def receive() -> Message:
            if not parts:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            body, more = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": more}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.refused.append(message["status"])

        headers = [(b"content-type", b"application/json")]
        await self.limit({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)

    async def _route(self, _scope: Scope, receive: Receive, _send: Send) -> None:
        body = (await receive())["body"]
        assert len(body) == SIZE
        self.references = sys.getrefcount(body) - 1
        await self.read.wait()
        self.num_answering += 1
        assert (await receive())["type"] == "http.disconnect"


def test_a_body_counts_until_it_is_read_and_not_until_it_is_answered() -> None:
    async def main() -> None:
        clients = Clients()
        await clients.ask(BUFFERED_BODIES + 2)
        assert clients.refused == [503, 503]
        clients.read.set()
        for number in range(1, 4):
            await clients.ask(BUFFERED_BODIES)
            assert clients.num_answering == (1 + number) * BUFFERED_BODIES
        assert clients.refused == [503, 503]
        await clients.leave()

    asyncio.run(main())


def test_a_body_that_nobody_reads_counts_until_its_route_ends() -> None:
    async def main() -> None:
        clients = Clients()
        await clients.ask(BUFFERED_BODIES)
        await clients.leave()
        await clients.ask(BUFFERED_BODIES)
        await clients.leave()
        assert clients.refused == []

    asyncio.run(main())


def test_a_body_is_only_its_route_s_once_that_has_it() -> None:
    async def main() -> None:
        clients = Clients()
        await clients.ask(1)
        assert clients.references < 2
        await clients.leave()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_routes_that_generate_give_the_body_back_when_they_begin(stream: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream}).encode().ljust(SIZE)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n"
    with ExitStack() as stack:
        server = stack.enter_context(live_server(max_body_bytes=SIZE))
        server.engine.script = Script(hold_after=0)
        for number in range(1, BUFFERED_BODIES + 2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(head + body)
            wait_until(lambda number=number: len(server.engine.held) == number)
