"""Replies that are not streamed hold so much and no more, and whoever asks for more is told what to do."""

import asyncio
import json
import re
import socket
from contextlib import ExitStack, suppress

import httpx
import pytest
from scripted_engine import LiveServer, Script, wait_until
from starlette.types import Message

from server.api import reply_memory
from server.api.piecewise import PiecewiseJSON
from server.api.reply_memory import ReplyMemory
from server.errors import InvalidRequest, ServerOverloaded

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5}
COMPLETION = {"model": "tiny", "prompt": "hi", "logprobs": 5, "max_tokens": 1000}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "ONE_BYTES", 50)
    monkeypatch.setattr(reply_memory, "ALL_BYTES", 100)


def test_a_reply_that_holds_too_much_fails_for_good() -> None:
    memory = ReplyMemory()
    with memory.reply() as held:
        held.grow(60 - 10)
        held.grow(-10)
        held.grow(10)
        with pytest.raises(InvalidRequest, match="stream") as refusal:
            held.grow(1)
        assert (refusal.value.status, refusal.value.param) == (400, "logprobs")
    assert memory.num_held == 0


def test_long_replies_give_way_to_short_ones_when_all_is_taken() -> None:
    memory = ReplyMemory()
    with memory.reply() as first, memory.reply() as second, memory.reply() as third, memory.reply():
        first.grow(48)
        second.grow(48)
        third.grow(33)  # an equal part of three: one that holds nothing takes none
        with pytest.raises(ServerOverloaded) as refusal:
            third.grow(1)
        assert refusal.value.retry_after is not None
        with pytest.raises(ServerOverloaded):
            second.grow(1)
    assert memory.num_held == 0
    with memory.reply() as alone:
        alone.grow(50)


def failures(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    return sum(map(float, re.findall(r'^longwave:request_success_total{.*reason="error".*} (.+)$', text, re.MULTILINE)))


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_the_caller_is_told_to_stream(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(reply_memory, "ONE_BYTES", 10_000)
    monkeypatch.setattr(reply_memory, "ALL_BYTES", 10_000)
    server.engine.script = Script(ends=False)
    with server.client() as client:
        before = failures(client)
        for fields in ({}, {"n": 2}):
            reply = client.post(path, json={**body, **fields})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "logprobs", None)
            assert "`stream`" in error["message"]
        assert failures(client) - before == 3  # choices, and none of them as if its client had gone
        server.engine.script = Script()
        wait_until(lambda: len(server.engine.aborted) == 3)
        assert client.post(path, json=body).status_code == 200
        with client.stream("POST", path, json={**body, "stream": True}) as streamed:
            assert sum(map(len, streamed.iter_bytes())) > 0
    assert reply_memory.memory.num_held == 0


@pytest.mark.parametrize("breaks", [False, True])
def test_what_a_reply_holds_counts_until_it_is_sent(breaks: bool) -> None:
    memory, seen = ReplyMemory(), []

    async def send(message: Message) -> None:
        seen.append((message["type"], memory.num_held))
        if breaks and message.get("body"):
            raise OSError

    async def main() -> None:
        with ExitStack() as stack:
            stack.enter_context(memory.reply()).grow(7)
            reply = PiecewiseJSON([b"{}"], stack.pop_all())
        with suppress(OSError):
            await reply({"type": "http"}, receive, send)

    async def receive() -> Message:
        raise AssertionError

    asyncio.run(main())
    body = ("http.response.body", 7)
    assert seen == [("http.response.start", 7), body, *([] if breaks else [body])]
    assert memory.num_held == 0


def test_what_a_reply_holds_no_longer_counts_when_its_client_has_gone(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_memory, "ONE_BYTES", 100_000)
    monkeypatch.setattr(reply_memory, "ALL_BYTES", 100_000)
    server.engine.script = Script(ends=False, hold_after=20)
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head % len(body) + body)
        wait_until(lambda: reply_memory.memory.num_held > 1000)
    wait_until(lambda: reply_memory.memory.num_held == 0)
    assert not reply_memory.memory.replies


def test_what_is_written_counts_beyond_what_always_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "SMALL_BYTES", 5)
    monkeypatch.setattr(reply_memory, "WRITTEN_BYTES", 70)
    memory = ReplyMemory()
    with memory.reply() as short, memory.reply() as first, memory.reply() as second:
        short.write(5)
        assert memory.num_held == 0
        first.write(5)
        first.write(65)
        assert memory.num_held == 70
        with pytest.raises(InvalidRequest) as refusal:
            first.write(1, "tokens")
        assert refusal.value.param == "tokens"
        second.write(30)
        with pytest.raises(ServerOverloaded):
            second.write(21)
    assert memory.num_held == 0


def test_replies_that_nobody_reads_are_held_up_to_a_bound(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "ALL_BYTES", 20 * 2**20)
    echoes = {"model": "tiny", "prompt": [[1] * 4000] * 48, "n": 8, "echo": True, "max_tokens": 0}  # of 9 MB
    body = json.dumps(echoes).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with ExitStack() as clients, server.client() as client:
        for number in (1, 2):
            connection = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(head % len(body) + body)
            wait_until(lambda number=number: reply_memory.memory.num_held > number * 8 * 2**20)
        reply = client.post("/v1/completions", json=echoes)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert client.post("/v1/completions", json=COMPLETION | {"logprobs": None}).status_code == 200
    wait_until(lambda: reply_memory.memory.num_held == 0)
    with server.client() as client:
        assert client.post("/v1/completions", json=echoes).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x" * 900}), ("/detokenize", {"tokens": [1] * 900})]
)
def test_texts_and_tokens_are_bounded_as_they_go_out(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(reply_memory, "WRITTEN_BYTES", 500)
    with server.client() as client:
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
