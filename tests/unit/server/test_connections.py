"""What clients do before there is a request, on real sockets: too many connections, and bytes that are no HTTP."""

import asyncio
import json
import re
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from scripted_engine import LIMIT, live_server, wait_until

from server import connections, process
from server.asgi import Receive, Scope, Send
from server.connections import HEADER_BYTES, MOST_FILES, TURNS, ImpatientProtocol, connection_limits, raise_file_limit
from server.errors import LongwaveError
from server.settings import Settings

ASK = b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n"
CLOSE = ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
FILES, MANY = 64, 300
#: A server that may open few files, and says its port and nothing else.
SERVER = f"""
import asyncio, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from server.process import Server, uvicorn_config
from server.settings import Settings

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for stage in ("startup", "shutdown"):
            await receive()
            await send({{"type": f"lifespan.{{stage}}.complete"}})
        return
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}})
    await send({{"type": "http.response.body", "body": b""}})

listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
asyncio.run(Server(uvicorn_config(app, Settings())).serve(sockets=[listener]))
"""


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


def whole(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of all that comes until the server closes."""
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def one(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one reply, however many pieces it comes in; nothing of the next one is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and (byte := client.recv(1)):
        head += byte
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
    return head, client.recv(int(length[1]), socket.MSG_WAITALL) if length else b""


def begins(client: socket.socket) -> bytes:
    """The status line, as far as its number."""
    return client.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL)


def is_answered(client: socket.socket, ask: bytes = ASK) -> bool:
    client.sendall(ask)
    head, _ = one(client)
    return head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_refused_in_openai_s_shape(sent: bytes) -> None:
    with live_server() as server, connect(server.port) as client:
        client.sendall(sent)
        head, body = whole(client)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: " in head
    error = json.loads(body)["error"]
    assert error == {"message": error["message"], "type": "invalid_request_error", "param": None, "code": None}


@pytest.mark.parametrize("start", [b"GET /", b"GET /v1/models HTTP/1.1\r\nHost: here\r\nX-Large: "])
def test_headers_without_end_are_refused_with_their_limit(start: bytes) -> None:
    with live_server() as server, connect(server.port) as client:
        client.sendall(start + b"a" * HEADER_BYTES)
        head, body = whole(client)
    assert head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "headers_too_large")
    assert f"{HEADER_BYTES} bytes" in error["message"]


def test_an_answer_that_is_broken_off_by_its_requests_body_fails_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no chunk comes when the answer has begun; the rest of it is sent before the connection is closed."""
    refuse, failures = ImpatientProtocol._refuse, list[Exception]()

    async def exchange() -> bytes:
        go_on, ended = asyncio.Event(), asyncio.Event()

        def refuse_and_go_on(self: ImpatientProtocol, error: LongwaveError) -> bool:
            go_on.set()
            return refuse(self, error)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                for stage in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{stage}.complete"})
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"an", "more_body": True})
            await go_on.wait()
            try:
                await send({"type": "http.response.body", "body": b"sw"})
            except Exception as error:
                failures.append(error)
            ended.set()

        monkeypatch.setattr(ImpatientProtocol, "_refuse", refuse_and_go_on)
        listener = socket.create_server(("127.0.0.1", 0))
        server = process.Server(process.uvicorn_config(app, Settings()))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n")
        received = await asyncio.wait_for(reader.readuntil(b"\r\n\r\nan"), LIMIT)
        writer.write(b"no chunk\r\n")
        await asyncio.wait_for(ended.wait(), LIMIT)
        with suppress(ConnectionResetError):
            received += await asyncio.wait_for(reader.read(), LIMIT)
        writer.close()
        server.should_exit = True
        await serving
        return received

    received = asyncio.run(exchange())
    assert received.endswith(b"\r\n\r\nan")
    assert failures == []


def test_a_refusal_is_not_lost_with_what_the_client_still_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", LIMIT)
    with live_server() as server, connect(server.port) as client:
        client.sendall(b"GET /" + b"a" * HEADER_BYTES)
        assert begins(client) == b"HTTP/1.1 431"
        for _ in range(8):
            client.sendall(b"a" * 2**16)
        client.shutdown(socket.SHUT_WR)
        _, body = whole(client)
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_who_goes_on_sending_what_is_refused_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    with live_server() as server, connect(server.port) as client:
        client.sendall(b"GET /" + b"a" * HEADER_BYTES)
        with suppress(ConnectionError):
            while True:
                client.sendall(b"a" * 2**16)


def test_a_body_that_is_no_http_ends_its_request_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n"
    for expects in (b"", b"Expect: 100-continue\r\n"):
        with live_server() as server, connect(server.port) as client:
            client.sendall(chunked + expects + b"Content-Type: application/json\r\n\r\nno length\r\n")
            head, body = one(client)
            if head.startswith(b"HTTP/1.1 100 "):
                head, body = one(client)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_websocket_is_refused_by_name_and_other_upgrades_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    http_2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    with live_server() as server, connect(server.port) as client:
        assert is_answered(client, b"GET /v1/models HTTP/1.1\r\nHost: here\r\n" + http_2)
        client.sendall(b"GET /v1/realtime HTTP/1.1\r\nHost: here\r\n" + websocket + CLOSE)
        head, body = one(client)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "WebSocket is not served" in json.loads(body)["error"]["message"]
        assert begins(client) == b"HTTP/1.1 200"
    assert [record.message for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_connection_too_many_is_told_to_come_again_and_the_rest_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "connection_limits", lambda: (2, 16))
    with live_server() as server, ExitStack() as stack:
        first, second = (stack.enter_context(connect(server.port)) for _ in range(2))
        assert is_answered(first)
        assert is_answered(second)
        for _ in range(3):
            with connect(server.port) as third:
                head, body = whole(third)
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: " in head
                assert json.loads(body)["error"]["code"] == "server_is_overloaded"
        assert is_answered(first)
        second.close()

        def is_served() -> bool:
            with connect(server.port) as fourth, suppress(ConnectionError):  # refused before it has asked
                return is_answered(fourth)
            return False

        wait_until(is_served)
    assert sum("connections are open" in record.message for record in caplog.records) == 1


def test_more_connections_than_files_leave_files_for_everything_else(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=file)
    assert server.stdout is not None
    with server, server.stdout:
        try:
            port = int(server.stdout.readline())
            with ExitStack() as stack:
                clients = [stack.enter_context(connect(port)) for _ in range(MANY)]
                most = connection_limits_of(FILES)
                refused = [client for client in clients[most:] if begins(client) == b"HTTP/1.1 503"]
                assert len(refused) == MANY - most
                clients[0].sendall(ASK)
                assert begins(clients[0]) == b"HTTP/1.1 200"
        finally:
            server.terminate()
    assert "Too many open files" not in log.read_text()


def test_no_part_of_a_reply_waits_until_the_one_before_is_acknowledged() -> None:
    async def nodelay() -> int:
        accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        class Accepting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set_result(transport.get_extra_info("socket"))

        listener = process.listen("127.0.0.1", 0)
        serving = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
        async with serving:
            with socket.create_connection(listener.getsockname(), timeout=LIMIT):
                return (await accepted).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert asyncio.run(nodelay())


def connection_limits_of(files: int) -> int:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        return connection_limits()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("files", [64, 256, 1024, 4096, MOST_FILES])
def test_connections_and_those_of_one_turn_together_are_fewer_than_files(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    connections, in_one_turn = connection_limits()
    assert 0 < in_one_turn <= connections < files - TURNS * in_one_turn


def test_the_limit_of_files_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for before in ((1024, 4096), (1024, resource.RLIM_INFINITY), (4096, 4096), (1 << 20, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, before=before: before)
        raise_file_limit()
    assert asked == [(4096, 4096), (MOST_FILES, resource.RLIM_INFINITY)]


def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    """RFC 9112, 6.1: whoever is in front of us may have read the other length."""
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n0\r\n\r\n"
    with live_server() as server, connect(server.port) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n" + lengths + ASK)
        head, _ = one(client)
        assert head.startswith(b"HTTP/1.1 400 ")
        with suppress(ConnectionResetError):  # it may close before it has read what follows
            assert client.recv(1) == b""
