"""How many bytes of bodies may be in memory, whose, and until when they count."""

import asyncio
import json
import socket
import sys
from contextlib import ExitStack

import pytest
from scripted_engine import Script, live_server, wait_until

from server.asgi import Message, Receive, Scope, Send
from server.body_limit import BUFFERED_BODIES, SMALL_BODY, BodyLimit

SIZE = 2 * SMALL_BODY
HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {SIZE}\r\n\r\n"
).encode()


class Clients:
    """They send bodies in two parts, to a route that reads them and waits before it looks for the end."""

    def __init__(self) -> None:
        self.limit = BodyLimit(self._route, max_bytes=SIZE, timeout=60)
        self.read = asyncio.Event()
        self.gone = asyncio.Event()
        self.refused: list[int] = []
        self.num_read = 0
        self.num_answering = 0
        self.references = 0  # to a body, when it was read
        self._asking: list[asyncio.Task[None]] = []

    async def ask(self, times: int, *, tenant: bytes = b"", size: int = SIZE, stalls: bool = False) -> None:
        """`stalls`: the last byte of what they send does not come before they leave."""
        self._asking += [asyncio.create_task(self._ask(tenant, size, stalls)) for _ in range(times)]
        for _ in range(20):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self.read.set()
        self.gone.set()
        await asyncio.gather(*self._asking)

    async def _ask(self, tenant: bytes, size: int, stalls: bool) -> None:
        parts = [(b"x" * (size // 2), True), (b"y" * (size - size // 2), False)]
        if stalls:
            parts[1] = (parts[1][0][:-1], True)

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
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {"cache_salt": tenant}}
        await self.limit(scope, receive, send)

    async def _route(self, _scope: Scope, receive: Receive, _send: Send) -> None:
        body = (await receive())["body"]
        self.num_read += 1
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


def test_large_bodies_of_one_key_do_not_shut_out_those_of_another() -> None:
    async def main() -> None:
        clients = Clients()
        await clients.ask(BUFFERED_BODIES + 1, tenant=b"flood", stalls=True)
        assert len(clients.refused) == 1
        await clients.ask(BUFFERED_BODIES, tenant=b"quiet")
        assert (clients.num_read, len(clients.refused)) == (BUFFERED_BODIES // 2, 1 + BUFFERED_BODIES // 2)
        await clients.ask(1, tenant=b"flood", size=SMALL_BODY)
        assert clients.num_read == BUFFERED_BODIES // 2 + 1
        await clients.leave()
        assert clients.num_answering == BUFFERED_BODIES // 2 + 1

    asyncio.run(main())


def test_small_bodies_always_have_room() -> None:
    async def main() -> None:
        clients = Clients()
        await clients.ask(BUFFERED_BODIES, stalls=True)
        await clients.ask(100, size=SMALL_BODY)
        assert (clients.num_read, clients.refused) == (100, [])
        await clients.ask(1, size=SMALL_BODY + 1)
        assert (clients.num_read, clients.refused) == (100, [503])
        await clients.leave()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_routes_that_generate_give_the_body_back_when_they_begin(stream: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream}).encode().ljust(SIZE)
    with ExitStack() as stack:
        server = stack.enter_context(live_server(max_body_bytes=SIZE))
        server.engine.script = Script(hold_after=0)
        for number in range(1, BUFFERED_BODIES + 2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(HEAD + body)
            wait_until(lambda number=number: len(server.engine.held) == number)


def test_large_bodies_that_stall_do_not_shut_out_ordinary_requests() -> None:
    asked = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    with ExitStack() as stack:
        server = stack.enter_context(live_server(max_body_bytes=SIZE))
        client = stack.enter_context(server.client(headers={"content-type": "application/json"}))

        def fills_up() -> bool:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(HEAD + b" " * (SIZE - 1))
            return client.post("/v1/completions", content=asked.ljust(SIZE)).status_code == 503

        wait_until(fills_up)
        assert client.post("/v1/completions", content=asked).status_code == 200
