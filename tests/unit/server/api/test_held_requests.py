"""What a request takes of memory, once it was read or refused: nothing of its body, however large that was."""

import gc
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from scripted_engine import LIMIT, LiveServer, Script, live_server, wait_until

BODY = 2 * 2**20
TIMES = 4
PADDING = " " * BODY
TEXT = '"prompt": "' + "a b" * (BODY // 3) + '"'
TRIMMING = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"
CHAT = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]%s}'

REFUSED = {
    "a field of a wrong type": ('{"model": "tiny", "max_tokens": "x", ' + TEXT + "}", 400),
    "fields that do not go together": ('{"model": "tiny", "best_of": 2, ' + TEXT + "}", 400),
    "no end": ('{"model": "tiny", ' + TEXT, 400),
    "too many values": ('{"model": "tiny", "prompt": [%s 1]}' % ("1.5," * (BODY // 4)), 413),
    "a list of numbers": ('{"model": "tiny", "prompt": [%s 1.5]}' % ("1.5," * 99_000), 400),
}
ANSWERED = {
    "spaces around": CHAT % (', "stream": false' + PADDING),
    "spaces around, in a stream": CHAT % (', "stream": true' + PADDING),
    "spaces that the template leaves out": CHAT.replace("hi", "hi" + PADDING) % "",
    "spaces that the template leaves out, in a stream": CHAT.replace("hi", "hi" + PADDING) % ', "stream": true',
}


@pytest.fixture
def grown() -> Iterator[Callable[[], int]]:
    """Bytes that are held beside what was, without a collection of garbage."""
    gc.collect()
    gc.disable()
    tracemalloc.start(1)
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()


def asked(server: LiveServer, path: str, body: bytes) -> socket.socket:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), LIMIT)
    connection.sendall(head.encode())
    connection.sendall(body)
    return connection


@pytest.mark.parametrize("why", REFUSED)
def test_what_was_refused_is_not_held(server: LiveServer, request: pytest.FixtureRequest, why: str) -> None:
    text, status = REFUSED[why]
    body = text.encode()
    grown = request.getfixturevalue("grown")
    for _ in range(TIMES):
        with asked(server, "/v1/completions", body) as connection:
            assert connection.recv(12) == f"HTTP/1.1 {status}".encode()
    wait_until(lambda: grown() < BODY)


@pytest.mark.parametrize("how", ANSWERED)
def test_while_it_is_answered_a_body_is_not_held(request: pytest.FixtureRequest, how: str) -> None:
    body = ANSWERED[how].encode()
    with live_server(template=TRIMMING) as server, ExitStack() as clients:
        server.engine.script = Script(hold_after=1)
        grown = request.getfixturevalue("grown")
        for _ in range(TIMES):
            clients.enter_context(asked(server, "/v1/chat/completions", body))
        wait_until(lambda: len(server.engine.held) == TIMES)
        wait_until(lambda: grown() < BODY)
