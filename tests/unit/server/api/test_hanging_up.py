"""Clients that go away, on real sockets: httpx's ASGITransport could not show it."""

import json
import socket

import pytest
from scripted_engine import LiveServer, Script, live_server, wait_until

from server.answering import SignReader
from server.api import sse

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def post(server: LiveServer, **fields: object) -> socket.socket:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def open_reservations(server: LiveServer) -> int:
    assert server.lifecycle.generator is not None
    return server.lifecycle.generator.num_active


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_before_the_first_token_aborts(server: LiveServer, n: int, stream: bool) -> None:
    server.engine.script = Script(hold_after=0)
    connection = post(server, stream=stream, n=n)
    wait_until(lambda: len(server.engine.held) == n)
    connection.close()
    wait_until(
        lambda: sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)
    )
    wait_until(lambda: open_reservations(server) == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_in_the_middle_aborts(server: LiveServer, stream: bool) -> None:
    server.engine.script = Script(ends=False)
    connection = post(server, stream=stream)
    if stream:
        received = b""
        while b"hello" not in received.replace(b'"}', b"") and received.count(b"data: ") < 8:
            piece = connection.recv(65536)
            assert piece
            received += piece
    else:
        wait_until(lambda: server.engine.requests)
    connection.close()
    wait_until(lambda: len(server.engine.aborted) == 1)
    wait_until(lambda: open_reservations(server) == 0)


def test_a_client_that_stops_reading_loses_its_place(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_LIMIT", 0.2)
    server.engine.script = Script(text=b"x" * 4000)
    # 20 MB of events: more than the buffers in between hold.
    connection = post(server, stream=True, n=2, logprobs=True, top_logprobs=20)
    wait_until(lambda: len(server.engine.aborted) == 2)
    wait_until(lambda: open_reservations(server) == 0)
    connection.close()


def test_hanging_up_often_leaks_nothing(server: LiveServer) -> None:
    server.engine.script = Script(ends=False)
    connections = [post(server, stream=number % 2 == 0, n=1 + number % 3) for number in range(60)]
    for connection in connections:
        connection.close()
    wait_until(lambda: open_reservations(server) == 0)
    wait_until(lambda: len(server.engine.aborted) == len(server.engine.requests))
    with server.client() as client:
        server.engine.script = Script()
        body = {"model": "tiny", "prompt": "x"}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hello world"


def test_hanging_up_while_uploading_reaches_no_engine(server: LiveServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(HEAD + b"content-length: 900\r\n\r\n{")
    connection.close()
    with server.client() as client:
        assert client.get("/health/live").status_code == 200
    assert server.engine.requests == []


def test_a_reader_that_does_not_read_holds_the_server_back_not_up() -> None:
    with live_server() as server:
        server.engine.script = Script(text=b"x" * 4000, ends=False)
        connection = post(server, stream=True)
        wait_until(lambda: server.engine.requests)
        with server.client() as client:
            assert client.get("/health/live").status_code == 200
        generator = server.lifecycle.generator
        assert generator is not None
        connection.close()
        wait_until(lambda: generator.num_active == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_lets_training_go_on(server: LiveServer, stream: bool) -> None:
    sign = SignReader(server.lifecycle.answering.fd)
    server.engine.script = Script(ends=False)
    connection = post(server, stream=stream)
    wait_until(lambda: server.engine.requests and sign.is_up())
    connection.close()
    wait_until(lambda: not sign.is_up())
