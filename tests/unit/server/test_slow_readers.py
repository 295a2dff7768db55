"""Clients that do not read what they asked for."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_engine import LIMIT, settings, wait_until
from uvicorn.server import ServerState

from server import process
from server.connections import ImpatientProtocol
from server.process import Server, uvicorn_config

ASKED = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
AT_ONCE = ASKED.replace(b"/", b"/at-once", 1)
SHORT = ASKED.replace(b"/", b"/short", 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
HALF = 1 << 20


@dataclass
class Answers:
    """Two pieces, of which the second waits until the first was read; or both at once."""

    server: Server
    port: int
    left: threading.Event = field(default_factory=threading.Event)  # the client has gone before the end
    loop: asyncio.AbstractEventLoop | None = None

    def connect(self, asked: bytes = ASKED) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(LIMIT)
        client.connect(("127.0.0.1", self.port))
        client.sendall(asked)
        return client

    def answered(self) -> Future[None]:
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(self.server.answered(), self.loop)

    def has_ended(self, waiting: Future[None]) -> bool:
        """Once it has had time to."""
        with suppress(TimeoutError):
            waiting.result(4 * process.LOOK_SECONDS)
        return waiting.done()

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self.loop = asyncio.get_running_loop()
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        await receive()
        if scope["path"] == "/short":  # more than the system's buffers take, and too little to pause who writes it
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"60000")]})
            await send({"type": "http.response.body", "body": bytes(60000)})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (2 * HALF))]})
        if scope["path"] == "/at-once":
            await send({"type": "http.response.body", "body": bytes(2 * HALF)})
            return
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


def read(client: socket.socket, num_bytes: int) -> int:
    """So many or a few more."""
    received = 0
    while received < num_bytes and (chunk := client.recv(1 << 16)):
        received += len(chunk)
    return received


def test_a_server_that_ends_waits_for_those_who_read_and_for_nobody_who_comes_later() -> None:
    with answering() as answers, answers.connect() as client:
        wait_until(lambda: answers.num_connections == 1 and answers.server.server_state.tasks)
        answered = answers.answered()
        with answers.connect():
            wait_until(lambda: answers.num_connections == 2)
            received = read(client, HALF)
            assert not answers.has_ended(answered)
            assert received + read(client, 2 * HALF - received) >= 2 * HALF
            answered.result(LIMIT)
            assert answers.num_connections == 2


def test_a_server_that_ends_waits_for_bytes_that_only_it_has() -> None:
    """The reply is complete, and the client has not read it."""
    with answering() as answers, answers.connect(AT_ONCE) as client:
        received = read(client, HALF)
        wait_until(lambda: not answers.server.server_state.tasks)
        (connection,) = answers.server.server_state.connections
        assert isinstance(connection, ImpatientProtocol)
        assert connection.cycle.response_complete
        answered = answers.answered()
        assert not answers.has_ended(answered)
        read(client, 2 * HALF - received)
        answered.result(LIMIT)


def test_a_server_that_ends_waits_for_no_client_that_left_or_asks_nothing() -> None:
    with answering() as answers, answers.connect() as client, socket.create_connection(("127.0.0.1", answers.port)):
        wait_until(lambda: answers.num_connections == 2 and answers.server.server_state.tasks)
        answered = answers.answered()
        client.close()
        answered.result(LIMIT)
        assert answers.num_connections == 1


def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "read_timeout", 0.3)
    with answering() as answers, answers.connect():
        assert answers.left.wait(LIMIT)
        wait_until(lambda: not answers.server.server_state.connections)


def test_a_short_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "read_timeout", 0.3)
    with answering() as answers, answers.connect(SHORT):
        wait_until(lambda: answers.num_connections == 1)
        wait_until(lambda: not answers.server.server_state.connections)


class Draining(asyncio.Transport):
    """Its buffer has these sizes, one after the other."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """What its buffer has is given."""

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


def test_whoever_reads_is_not_cut_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "read_timeout", 1.0)
    with answering() as answers, answers.connect() as client:
        received = 0
        while received < 2 * HALF:
            received += len(client.recv(1 << 16))
        (connection,) = answers.server.server_state.connections
        assert isinstance(connection, ImpatientProtocol)
        wait_until(lambda: connection._reading is None)
        assert not answers.left.is_set()
