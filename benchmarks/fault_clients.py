"""Clients that behave well, badly, or leave. Each gives the reply that counts; none judges it."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.fault_outcomes import OK, PATIENCE, Reply, is_answer

RECOVERY = 300.0  # seconds after which a server counts as gone
POLL = 0.5
CHAT = "/v1/chat/completions"
SILENT_CONNECTIONS = 64
LEAVING_CLIENTS = 4
LEFT_AFTER = 1.0  # seconds into a long prompt
LONG = "Count from one to one thousand in words, and leave no number out."
LONG_TOKENS = 1500
LAST_TOKENS = 60  # of the stream that SIGTERM must not cut


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is being asked."""

    url: str
    model: str
    context: int  # tokens that the model takes
    process: subprocess.Popen[bytes] | None = None  # of a server that was started for this

    def good_body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Say hello."}]
        return {"model": self.model, "messages": messages, "max_tokens": 4, "temperature": 0}


def _ask(target: Target, method: str, path: str, content: bytes | None) -> Reply:
    """One request on a connection of its own. What never ends is cut after PATIENCE, trickling or not."""
    status, body, timed_out = None, bytearray(), False
    headers = {"content-type": "application/json"} if content is not None else {}
    with httpx.Client(timeout=PATIENCE) as client:
        begin = time.monotonic()  # making the client takes longer than many an answer
        try:
            with client.stream(method, target.url + path, content=content, headers=headers) as reply:
                status = reply.status_code
                for chunk in reply.iter_bytes():
                    body += chunk
                    if time.monotonic() - begin > PATIENCE:
                        timed_out = True
                        break
        except httpx.TimeoutException:
            timed_out = True
        except httpx.TransportError:
            pass  # refused or cut short: no status, or a body that is no answer
        return Reply(status, bytes(body), 1e3 * (time.monotonic() - begin), timed_out)


def post(target: Target, content: bytes, path: str = CHAT) -> Reply:
    return _ask(target, "POST", path, content)


def get(target: Target) -> Reply:
    return _ask(target, "GET", CHAT, None)


def good(target: Target) -> Reply:
    """The small good request."""
    return post(target, json.dumps(target.good_body()).encode())


def answers_after(target: Target, limit: float = RECOVERY) -> float | None:
    """Seconds until a good request is answered, asked again as long as none is; None after `limit`, or when the
    server's process has ended."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit and (target.process is None or target.process.poll() is None):
        reply = good(target)
        if reply.status == OK and not reply.timed_out and is_answer(reply.body):
            return time.monotonic() - begin
        time.sleep(POLL)
    return None


@contextmanager
def _connection(target: Target, sent: bytes) -> Iterator[socket.socket]:
    place = urlsplit(target.url)
    with socket.create_connection((place.hostname, place.port or 80), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        yield connection


def _head(content: bytes) -> bytes:
    kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n".encode()


def beside_half_a_body(target: Target) -> Reply:
    whole = json.dumps(target.good_body()).encode()
    with _connection(target, _head(whole) + whole[: len(whole) // 2]):
        return good(target)


def beside_silence(target: Target) -> Reply:
    with ExitStack() as open_ones:
        for _ in range(SILENT_CONNECTIONS):
            open_ones.enter_context(_connection(target, b""))
        return good(target)


def _long_body(target: Target, tokens: int) -> bytes:
    asked = {"messages": [{"role": "user", "content": LONG}], "max_tokens": tokens, "stream": True}
    return json.dumps(target.good_body() | asked).encode()


@contextmanager
def _begun_stream(target: Target, tokens: int) -> Iterator[tuple[httpx.Response, Iterator[bytes], bytearray]]:
    """A long answer, what is left of it, and what has come: at least a first event."""
    headers = {"content-type": "application/json"}
    content = _long_body(target, tokens)
    with httpx.stream("POST", target.url + CHAT, content=content, headers=headers, timeout=PATIENCE) as reply:
        rest = reply.iter_bytes()
        read = bytearray()
        while b'"content":' not in read.replace(b'"content":""', b"").replace(b'"content": ""', b""):
            chunk = next(rest, b"")
            if not chunk:
                raise httpx.ReadError("the stream ended before its first text")
            read += chunk
        yield reply, rest, read


def after_left_streams(target: Target) -> Reply:
    """The first of them has begun; a server that answers one at a time lets the others wait."""
    content = _long_body(target, LONG_TOKENS)
    begin = time.monotonic()
    try:
        with _begun_stream(target, LONG_TOKENS):
            for _ in range(LEAVING_CLIENTS - 1):
                with _connection(target, _head(content) + content) as connection, suppress(TimeoutError):
                    connection.settimeout(LEFT_AFTER)
                    connection.recv(1)
    except (httpx.TimeoutException, TimeoutError):
        return Reply(None, b"", 1e3 * (time.monotonic() - begin), timed_out=True)
    except (httpx.TransportError, OSError):
        return Reply(None, b"", 1e3 * (time.monotonic() - begin))
    return good(target)


def after_left_prompt(target: Target) -> Reply:
    prompt = "wave " * (target.context * 3 // 4)
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": target.context // 8}
    with suppress(httpx.TransportError):
        httpx.post(target.url + CHAT, json=target.good_body() | asked, timeout=LEFT_AFTER)
    return good(target)


def ended(target: Target) -> Reply:
    """SIGTERM after a stream's first text; the reply is the stream's, its milliseconds last until the process's end.
    Raises ValueError for a server that was not started here."""
    if target.process is None:
        raise ValueError("only a server that was started here can be ended")
    status, body, timed_out, begin = None, bytearray(), False, time.monotonic()
    try:
        with _begun_stream(target, LAST_TOKENS) as (reply, rest, read):
            begin = time.monotonic()
            target.process.send_signal(signal.SIGTERM)
            status, body = reply.status_code, read
            for chunk in rest:
                body += chunk
    except httpx.TimeoutException:
        timed_out = True
    except httpx.TransportError:
        pass  # cut short: the body is no answer then
    try:
        code = target.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        code, timed_out = None, True
    return Reply(status, bytes(body), 1e3 * (time.monotonic() - begin), timed_out, code)
