"""Bytes that are hardly ever a right request: each connection is told something documented, or nothing, and closed."""

import asyncio
import logging
from collections import Counter
from random import Random

import pytest
from scripted_engine import MODEL, live_server, wait_until

from benchmarks.raw_exchange import exchange, replies
from benchmarks.raw_http import judge
from benchmarks.raw_requests import good, in_parts, mutated

REQUESTS, AT_ONCE = 1000, 20
WRONG = ("undocumented", "out of shape", "inside", "no reply", "not closed")


def test_bytes_that_are_hardly_requests_are_refused_and_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    random, seen, left = Random(5), Counter[str | int](), iter(range(REQUESTS))
    wrong: list[bytes] = []

    async def clients(port: int) -> None:
        async def one_after_the_other() -> None:
            for _ in left:
                raw = mutated(random, MODEL)
                one: Counter[str | int] = Counter()
                judge(one, await exchange(port, in_parts(random, raw), silence=0.1))
                seen.update(one)
                if sum(one[name] for name in WRONG):
                    wrong.append(raw[:300])

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one_after_the_other())

    with live_server() as server:
        asyncio.run(clients(server.port))
        (after,) = replies(asyncio.run(exchange(server.port, [good(Random(1), MODEL).raw()])) or b"")
        wait_until(lambda: len(server.engine.requests) >= len(server.engine.aborted))
    assert wrong == []
    assert seen["connections"] == REQUESTS
    assert min(seen[200], seen[400]) > REQUESTS / 20
    assert after.status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_replies_are_told_apart() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    refusal = b'HTTP/1.1 400 Bad\r\ncontent-length: 13\r\n\r\n{"error": {}}'
    head = b"HTTP/1.1 405 No\r\ncontent-length: 99\r\n\r\n"
    late = b"HTTP/1.1 503 X\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
    found = list(replies(chunked + head + refusal + late))
    assert [(one.status, one.body) for one in found] == [(200, b"abc"), (405, b""), (400, b'{"error": {}}'), (503, b"")]
    assert [one.is_in_shape for one in found] == [True, True, False, True]
    assert [one.is_documented for one in found] == [True, True, True, True]
    assert not next(replies(late.replace(b"retry-after", b"x"))).is_documented
    with pytest.raises(ValueError, match="no reply"):
        list(replies(refusal + b"HTTP/1.0 what"))


def test_the_same_random_numbers_make_the_same_requests() -> None:
    assert [mutated(Random(3), MODEL) for _ in range(2)] == [mutated(Random(3), MODEL)] * 2
