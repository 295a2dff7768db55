"""Clients that do not read what they asked for."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_engine import LIMIT, settings, wait_until
from uvicorn.server import ServerState

from server.connections import ImpatientProtocol
from server.process import Server, uvicorn_config

ASKED = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HALF = 1 << 20


@dataclass
class Answers:
    """Two pieces, of which the second waits until the first was read."""

    server: Server
    port: int
    left: threading.Event = field(default_factory=threading.Event)  # the client has gone before the end

    def connect(self) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(LIMIT)
        client.connect(("127.0.0.1", self.port))
        client.sendall(ASKED)
        return client

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (2 * HALF))]})
        await send({"type": "http.response.body", "body": bytes(HALF), "more_body": True})
        await send({"type": "http.response.body", "body": bytes(HALF), "more_body": True})
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait((leaving,), timeout=0)
        if leaving.done():
            self.left.set()
        leaving.cancel()
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def answering() -> Iterator[Answers]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await answers(scope, receive, send)

    server = Server(uvicorn_config(app, settings()))
    answers = Answers(server, listener.getsockname()[1])
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield answers
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "read_timeout", 0.3)
    with answering() as answers, answers.connect():
        assert answers.left.wait(LIMIT)
        wait_until(lambda: not answers.server.server_state.connections)


class Draining(asyncio.Transport):
    """Its buffer has these sizes, one after the other."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def abort(self) -> None:
        self.aborted.set()


def test_whoever_reads_slowly_is_not_cut() -> None:
    async def main() -> None:
        config = uvicorn_config(_nothing, settings())
        config.load()
        connection = ImpatientProtocol(config, ServerState(), {})
        connection.read_timeout = 0.0
        transport = Draining(9, 8, 5, 1, 1)
        connection.connection_made(transport)
        connection.pause_writing()
        await asyncio.wait_for(transport.aborted.wait(), LIMIT)
        assert transport.sizes == []

    asyncio.run(main())


async def _nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError


def test_whoever_reads_is_not_cut_later() -> None:
    with answering() as answers, answers.connect() as client:
        received = 0
        while received < 2 * HALF:
            received += len(client.recv(1 << 16))
        (connection,) = answers.server.server_state.connections
        assert isinstance(connection, ImpatientProtocol)
        wait_until(lambda: connection._reading is None)
        assert not answers.left.is_set()
