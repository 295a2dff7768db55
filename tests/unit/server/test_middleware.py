"""Keys, bodies, ids and the log, on a real socket."""

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import LIMIT, LiveServer, live_server, wait_until

from server.app import Application, create_app
from server.asgi import Message, Receive, Scope, Send
from server.body_limit import BodyLimit
from server.middleware import OPEN_PATHS, OriginForm

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with live_server(api_key="first-key,second-key") as server:
        yield server


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=2048) as server:
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[LiveServer]:
    with live_server(header_timeout=0.3) as server:
        yield server


def exchange(server: LiveServer, request: bytes) -> bytes:
    """Everything the server says until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(request)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:  # it closed with our bytes unread
            pass
    return received


def walk(routes: list[Any]) -> Iterator[Any]:
    """Plain routes; newer FastAPI keeps included routers as they are."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from [route] if inner is None else walk(inner.routes)


def test_every_route_but_probes_and_page_asks_for_a_key(locked: LiveServer) -> None:
    routes = list(walk(create_app(locked.lifecycle).routes))
    assert {route.path for route in routes} >= OPEN_PATHS | {"/v1/chat/completions", "/metrics", "/openapi.json"}
    with locked.client() as client:
        for route in routes:
            for method in route.methods:
                path = re.sub(r"{.*}", "x", route.path)
                reply = client.request(method, path)
                if path in OPEN_PATHS:
                    assert reply.status_code == 200, path
                else:
                    assert reply.status_code == 401, path
        assert client.get("/no/such/route").status_code == 401


def test_the_description_of_the_api_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    described, answered = Application.openapi, threading.Event()

    def describe(app: Application) -> dict[str, Any]:
        assert answered.wait(LIMIT)
        return described(app)

    monkeypatch.setattr(Application, "openapi", describe)
    with live_server() as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        described_later = pool.submit(lambda: httpx.get(f"{server.url}/openapi.json", timeout=LIMIT))
        try:
            assert client.get("/health/live").status_code == 200
        finally:
            answered.set()
        assert "/v1/chat/completions" in described_later.result().json()["paths"]
        assert client.head("/openapi.json").status_code == 200
        assert 'handler="/openapi.json"' in client.get("/metrics").text


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return client.options("/v1/chat/completions", headers={"origin": origin, **asked})


def test_pages_of_allowed_origins_may_ask_and_no_others() -> None:
    page, other = "https://chat.example", "https://evil.example"
    with live_server(api_key="first-key", allowed_origins=page) as server, server.client() as client:
        asked = preflight(client, page)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == page
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-origin" not in preflight(client, other).headers
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "model": "none"}):
            headers = {"authorization": "Bearer first-key", "origin": page}
            reply = client.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.headers["access-control-allow-origin"] == page
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            reply = client.post("/v1/chat/completions", json=body, headers={**headers, "origin": other})
            assert "access-control-allow-origin" not in reply.headers
        refused = client.post("/v1/chat/completions", json=CHAT, headers={"origin": page})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)


def test_without_allowed_origins_no_page_of_another_may_ask(narrow: LiveServer) -> None:
    with narrow.client() as client:
        assert preflight(client, "https://chat.example").status_code == 405
        reply = client.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://chat.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key",
     "Bearer first-key,second-key", "Bearer ünï"],
)  # fmt: skip
def test_wrong_keys_are_401_in_openais_shape(locked: LiveServer, value: str) -> None:
    with locked.client() as client:
        reply = client.get("/v1/models", headers={"authorization": value.encode()})
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_each_key_opens_and_has_a_prefix_cache_of_its_own(locked: LiveServer) -> None:
    locked.engine.requests.clear()
    with locked.client() as client:
        for key in ("first-key", "second-key", "first-key"):
            headers = {"authorization": f"bearer {key}"}
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    first, second, again = [request.cache_salt for request in locked.engine.requests]
    assert first == again
    assert first != second
    assert len(first) == 32


def test_without_keys_everything_is_open_and_unsalted(server: LiveServer) -> None:
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.get("/metrics").status_code == 200
    assert server.engine.requests[0].cache_salt == b""


def test_request_ids_are_returned_and_hostile_ones_replaced(server: LiveServer) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"x-request-id": "mine-1.2"}).headers["x-request-id"] == "mine-1.2"
        for hostile in ("a b", "x" * 129, "new\tline", "<script>", ""):
            given = client.get("/health", headers={"x-request-id": hostile}).headers["x-request-id"]
            assert re.fullmatch(r"[0-9a-f]{32}", given)
        assert client.get("/nothing").headers["x-request-id"]


def test_unknown_routes_and_methods_have_openais_shape(server: LiveServer) -> None:
    with server.client() as client:
        missing, method = client.get("/v2/nothing"), client.get("/v1/chat/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"
    assert set(missing.json()["error"]) == set(method.json()["error"]) == {"message", "type", "param", "code"}
    assert "typos" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/resp_1/cancel", "/v1/responses"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/v1/batches", "/v1/batches"),
        ("/v1/images/generations", "/v1/images"),
        ("/v1/audio/speech", "/v1/audio"),
        ("/v1/moderations", "/v1/moderations"),
        ("/v1/assistants", "/v1/assistants"),
        ("/v1/threads/thread_1/runs", "/v1/threads"),
        ("/v1/evals/eval_1/runs", "/v1/evals"),
        ("/v1/vector_stores", "/v1/vector_stores"),
        ("/v1/containers/cntr_1/files", "/v1/containers"),
    ],
)
def test_openais_routes_that_are_not_served_are_no_typos(server: LiveServer, path: str, route: str) -> None:
    with server.client() as client:
        replies = [client.post(path, json={}), client.get(path)]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
        assert error["message"] == (
            f"{route} is not served here. For text there are /v1/chat/completions and /v1/completions."
        )


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/uploads/upload_1/parts", "/v1/uploads is not served here. Files are sent whole, to /v1/files."),
        (
            "/v1/fine_tuning/checkpoints/ft:a:b:c:ckpt-step-4/permissions",
            "/v1/fine_tuning/checkpoints is not served here. Fine-tuning has /v1/fine_tuning/jobs.",
        ),
        (
            "/v1/fine_tuning/alpha/graders/run",
            "/v1/fine_tuning/alpha is not served here. Fine-tuning has /v1/fine_tuning/jobs.",
        ),
    ],
)
def test_what_there_is_instead_of_a_route_is_told(server: LiveServer, path: str, told: str) -> None:
    with server.client() as client:
        reply = client.post(path, json={})
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, told)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "/v1/fine_tuning/jobs",
            "/v1/fine_tuning is not served here. The server was started with --no-enable-fine-tuning.",
        ),
        (
            "/v1/fine_tuning/checkpoints/ft:a:b:c:ckpt-step-4/permissions",
            "/v1/fine_tuning is not served here. The server was started with --no-enable-fine-tuning.",
        ),
        (
            "/v1/training/create_model",
            "/v1/training is not served here. The server was started with --no-enable-training.",
        ),
    ],
)
def test_routes_that_were_turned_off_are_no_typos(tmp_path: Path, path: str, told: str) -> None:
    with live_server(enable_fine_tuning=False, enable_training=False, data_dir=tmp_path) as server:
        reply = httpx.post(f"{server.url}{path}", json={})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["message"]) == (404, "unknown_url", told)


@pytest.mark.parametrize("path", ["/v1/response", "/v1/evals_of_mine", "/v1/fine_tuning/alphabet"])
def test_a_url_that_only_looks_like_openais_may_be_a_typo(server: LiveServer, path: str) -> None:
    with server.client() as client:
        assert "typos" in client.post(path, json={}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "methods"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-1", "DELETE, GET"),
        ("/v1/models/a-model", "DELETE, GET"),
        ("/v1/fine_tuning/jobs/job-1/cancel", "POST"),
    ],
)
def test_all_methods_of_a_url_are_named(server: LiveServer, url: str, methods: str) -> None:
    text = {"content": b"a=1", "headers": {"content-type": "application/x-www-form-urlencoded"}}
    with server.client() as client:
        replies = [client.put(url), client.put(url, json={}), client.put(url, **text)]  # whatever it holds
    assert [(reply.status_code, reply.headers["allow"]) for reply in replies] == [(405, methods)] * 3


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://else.where/health", 200),
        ("HTTP://else.where:80/health?x=1", 200),
        ("https://me:secret@[::1]:8000/%68ealth", 200),
        ("http://else.where", 200),  # the page
        ("http://else.where?x", 200),
        ("http://else.where/v1/models", 401),
        ("http://else.where//health", 404),
        ("http:///health", 404),
        ("http:/health", 404),
        ("ftp://else.where/health", 404),
    ],
)
def test_targets_in_absolute_form_are_served_as_their_path(locked: LiveServer, target: str, status: int) -> None:
    asked = f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    expected = 401 if status == 404 else status  # a route that does not exist asks for a key too
    assert exchange(locked, asked).startswith(f"HTTP/1.1 {expected} ".encode())
    with_key = asked.replace(b"host: x", b"host: x\r\nauthorization: Bearer first-key")
    assert exchange(locked, with_key).startswith(f"HTTP/1.1 {200 if status == 401 else status} ".encode())


def test_the_host_of_a_target_stands_above_the_header() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope)

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    scope = {"type": "http", "raw_path": b"http://a@b:1/%41", "path": "http://a@b:1/A", "headers": [(b"host", b"c")]}
    asyncio.run(OriginForm(app)(scope, nothing, nothing))
    assert (seen[0]["path"], seen[0]["raw_path"], seen[0]["headers"]) == ("/A", b"/%41", [(b"host", b"b:1")])


def test_a_declared_body_over_the_limit_is_413_unread(narrow: LiveServer) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    received = exchange(narrow, head + b"content-length: 1000000000\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in received
    assert b"connection: close" in received.lower()


def test_a_chunked_body_over_the_limit_is_413(narrow: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    received = exchange(narrow, head + b"transfer-encoding: chunked\r\n\r\n" + (b"400\r\n" + b"x" * 1024 + b"\r\n") * 3)
    assert received.startswith(b"HTTP/1.1 413")


def test_a_body_at_the_limit_is_read(narrow: LiveServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    body += b" " * (2048 - len(body))
    with narrow.client() as client:
        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200
        assert client.post("/v1/completions", content=body + b" ", headers=headers).status_code == 413


def test_a_connection_closes_only_when_a_refused_body_has_come() -> None:
    """Closed on unread bytes it is reset, and the client may lose the reply."""
    parts = [(b"x" * 1024, True)] * 5 + [(b"x", False)]
    order: list[str] = []

    async def receive() -> Message:
        body, more = parts.pop(0)
        order.append("part" if more else "last part")
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: Message) -> None:
        order.append("closing" if message.get("more_body") is False or message.get("body") == b"" else message["type"])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the body is over the limit")

    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "headers": headers, "state": {"cache_salt": b""}}
    asyncio.run(BodyLimit(app, max_bytes=2048, timeout=5)(scope, receive, send))

    assert order[-2:] == ["last part", "closing"]
    assert order.index("http.response.start") < order.index("last part")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_encoded_bodies_are_415(server: LiveServer, encoding: str) -> None:
    with server.client() as client:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        reply = client.post("/v1/completions", content=b"{}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_that_are_no_json_are_415(server: LiveServer, media_type: str) -> None:
    with server.client() as client:
        reply = client.post("/v1/completions", content=b'{"model":"tiny"}', headers={"content-type": media_type})
    assert reply.status_code == 415


def test_a_body_that_drips_is_408_and_closed() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with live_server(body_timeout=0.3) as server:
        assert exchange(server, head).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_connection_that_does_not_ask_is_closed(impatient: LiveServer, begun: bytes) -> None:
    assert exchange(impatient, begun) == b""


def test_a_second_request_that_drips_is_closed(impatient: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=LIMIT) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        with suppress(ConnectionError):  # it was closed before this came
            connection.sendall(b"GET /hea")
            while connection.recv(65536):  # the first reply's rest, then the end
                pass


def test_huge_headers_are_refused(server: LiveServer) -> None:
    received = exchange(server, b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n")
    assert received == b"" or received.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_our_bugs_are_500_without_details(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_model: str | None, _owner: str) -> None:
        raise RuntimeError("secret detail at 0x7f00deadbeef")

    monkeypatch.setattr(server.lifecycle, "accepting", broken)
    with server.client() as client:
        reply = client.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "server_error")
    assert reply.headers["x-request-id"] in error["message"]
    assert not re.search(r"secret|Traceback|site-packages|0x[0-9a-f]{8,}", reply.text)
    assert "secret detail" in caplog.text  # the log has it


def test_prompts_keys_and_queries_are_not_logged(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "canary-prompt"}], "user": "canary-user"}
    with locked.client(headers={"authorization": "Bearer first-key"}) as client:
        client.post("/v1/chat/completions?key=canary-query", json=body)
        client.post("/v1/chat/completions", json={**body, "temperature": "canary-value"})
        client.get("/canary-path")
        metrics = client.get("/metrics").text
    wait_until(lambda: "/metrics" in caplog.text)
    ours = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("http"))
    assert "POST /v1/chat/completions 200" in ours
    for text in (ours, metrics):
        assert "canary" not in text
        assert "first-key" not in text


def test_polling_is_logged_only_when_its_answer_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live_server() as server, server.client() as client:
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert client.get(path).status_code == 200
        for alive, status in ((False, 503), (False, 503), (True, 200), (True, 200)):
            server.engine.alive = alive
            assert client.get("/health/live").status_code == status
    wait_until(lambda: "200" in caplog.text)
    ours = [record.getMessage() for record in caplog.records if record.name == "longwave.access"]
    assert [line.split()[1:3] for line in ours] == [["/health/live", "503"], ["/health/live", "200"]]
