"""Trial: a body without end, headers without measure, and many connections that send a byte a second. Design: S4."""

import asyncio
import gzip
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks import fault_clients
from benchmarks.fault_outcomes import OK
from benchmarks.raw_exchange import exchange, replies
from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, closed_loop, open_loop
from benchmarks.trial_server import TrialServer, trial_server
from server.connections import raise_file_limit

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
WHOLE = 10**9  # bytes of a body that does not say its length
CHUNK = 2**20
BODY_MB = 16.8  # that a server takes
HEADERS = 128 * 2**10  # bytes
TRIES = 50
LIFE = 35.0  # seconds: 30 for headers or a body to come, 2 in which a refusal is read, and some
PROBES = 5.0  # a second
CLIENTS = 2


@dataclass(slots=True)
class Dripping:
    lives: list[float] = field(default_factory=list)  # seconds until the server closed
    statuses: list[int] = field(default_factory=list)
    most: int = 0  # at once
    now: int = 0


def slow_clients(scale: Scale) -> list[Measure]:
    raise_file_limit()
    with trial_server(scale.model) as server:
        port = urlsplit(server.url).port
        assert port is not None
        fault_clients.good(server.target)
        status, sent, grown = asyncio.run(_without_end(server, port))
        headers = [_statuses(port, b"GET /health/live HTTP/1.1\r\nHost: here\r\nX: %b\r\n\r\n" % (b"x" * HEADERS))
                   for _ in range(TRIES)]  # fmt: skip
        packed = gzip.compress(chat(server, "Hello.", 1))
        encoded = _statuses(port, POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)
        server.idle_after()
        before = server.held()
        dripping, probes, good = asyncio.run(_dripped(server, port, scale))
        idle = server.idle_after()
        after = server.held()
    return [
        Measure("a body of 1 GB in chunks: refused with 413 (1: yes)", float(status == 413), 1, at_least=True),
        Measure("MB of it that were sent", sent / 1e6),
        Measure("growth of the process meanwhile, MB", grown, 2 * BODY_MB),
        Measure("requests with headers of 128 KB", TRIES),
        Measure("of them not refused with 431", sum(found != [431] for found in headers), 0),
        Measure("a body in gzip: refused with 415 (1: yes)", float(encoded == [415]), 1, at_least=True),
        Measure("connections of a byte a second, at once", dripping.most, scale.slow, at_least=True),
        Measure("of them closed by the server", len(dripping.lives), 1, at_least=True),
        Measure("of them told 408", sum(status == 408 for status in dripping.statuses)),
        Measure("seconds until they are closed, at most", max(dripping.lives), LIFE),
        Measure("probes beside them, p99 ms", percentile([probe.ms for probe in probes], 99), 100),
        Measure("probes that failed", sum(probe.status != OK for probe in probes), 0),
        Measure("good requests beside them", len(good), 1, at_least=True),
        Measure("of them not answered", sum(not answer.is_whole for answer in good), 0),
        Measure("seconds until all KV blocks are free", idle, 1),
        Measure("files more than before", after.files - before.files, 0),
    ]


def _statuses(port: int, asked: bytes) -> list[int]:
    return [reply.status for reply in replies(asyncio.run(exchange(port, [asked])) or b"")]


async def _without_end(server: TrialServer, port: int) -> tuple[int, int, float]:
    """The reply's status (0: none), the bytes that were sent until the server closed, and the process's growth."""
    before, most, sent = server.held().rss_mb, 0.0, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    reply = asyncio.create_task(reader.read(65536))
    with suppress(ConnectionError):
        while sent < WHOLE and not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (CHUNK, b" " * CHUNK))
            await writer.drain()
            sent += CHUNK
            most = max(most, server.held().rss_mb)
    came = b""
    with suppress(ConnectionError):
        came = await reply
    writer.transport.abort()
    return next((one.status for one in replies(came)), 0), sent, most - before


async def _dripped(server: TrialServer, port: int, scale: Scale) -> tuple[Dripping, list[Answer], list[Answer]]:
    """So many connections for so long; and probes and good requests beside them."""
    dripping, end = Dripping(), time.monotonic() + scale.seconds
    body = json.dumps(server.target.good_body()).encode()
    starts = (
        b"",
        POST + b"Content-Length: %d\r\n\r\n" % len(body),
        POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body),
    )

    async def connections(start: bytes) -> None:
        """One after the other."""
        while time.monotonic() < end:
            with suppress(ConnectionError):
                await _drip(dripping, port, start, (POST + b"X: " + b"x" * 1000) if not start else body)

    async def good(number: int) -> Answer:
        return await ask(server.url, chat(server, f"{number} hello", 1))

    async with asyncio.TaskGroup() as group:
        for number in range(scale.slow):
            group.create_task(connections(starts[number % len(starts)]))
        others = asyncio.gather(
            open_loop(PROBES, scale.seconds, lambda _number: ask(server.url, None, "/health/live")),
            closed_loop(CLIENTS, scale.seconds, good),
        )
        probes, answers = await others
    return dripping, probes, answers


async def _drip(dripping: Dripping, port: int, start: bytes, rest: bytes) -> None:
    """A byte a second, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = time.monotonic()
    dripping.now += 1
    dripping.most = max(dripping.most, dripping.now)
    came = asyncio.create_task(reader.read())
    writer.write(start)
    try:
        for at in range(len(rest)):
            if (await asyncio.wait([came], timeout=1.0))[0]:
                break
            writer.write(rest[at : at + 1])
        dripping.lives.append(time.monotonic() - begin)
        if came.done() and came.exception() is None:
            with suppress(ValueError):
                dripping.statuses += [reply.status for reply in replies(came.result())]
    finally:
        dripping.now -= 1
        came.cancel()
        writer.transport.abort()
