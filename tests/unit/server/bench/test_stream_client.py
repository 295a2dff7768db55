"""The streaming client against servers on real sockets that answer well, badly, in pieces, or not at all."""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from server.bench import outcome as why
from server.bench import stream_client
from server.bench.outcome import Outcome
from server.bench.stream_client import StreamClient, Target
from server.bench.workload import Turn

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def event(payload: Any) -> bytes:
    data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return b"data: " + data + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str = " a", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


def usage(completion: int, prompt: int = 3) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


DONE = b"[DONE]"
GOOD = [token(), token(), token(finish="length"), usage(3), DONE]


def stream(*events: Any) -> bytes:
    return HEAD + b"".join(chunk(event(one)) for one in events) + LAST


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
    return head + await reader.readexactly(length)


def ask(answer: Answer, count: int = 1, *, at_once: bool = False, **target: Any) -> list[Outcome]:
    """`count` requests of three prompt and three answer tokens to a server that answers each connection so."""

    open_connections: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(asyncio.current_task())
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client hung up
                await answer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def run() -> list[Outcome]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(Target(f"http://127.0.0.1:{port}/v1", "m", **target))
        turn = Turn([1, 2, 3], 3, 3)
        if at_once:
            outcomes = await asyncio.gather(*(client.complete(turn) for _ in range(count)))
        else:
            outcomes = [await client.complete(turn) for _ in range(count)]
        client.close()
        server.close()
        await server.wait_closed()
        await asyncio.gather(*filter(None, open_connections))
        return outcomes

    return asyncio.run(run())


def replying(reply: bytes, pieces: int = 0) -> Answer:
    """One reply, then the connection ends; in pieces of so many bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        step = pieces or len(reply) or 1
        for at in range(0, len(reply), step):
            writer.write(reply[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def failure_of(*events: Any, **target: Any) -> tuple[str | None, str]:
    (outcome,) = ask(replying(stream(*events)), **target)
    return outcome.failure, outcome.detail


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_a_good_stream_however_it_is_cut(pieces: int) -> None:
    (outcome,) = ask(replying(stream(*GOOD), pieces))
    assert outcome.failure is None
    assert [count for _, count in outcome.chunks] == [1, 1, 1]
    assert outcome.output_tokens == 3
    assert outcome.chunks_are_tokens
    assert outcome.planned <= outcome.sent <= outcome.chunks[0][0] <= outcome.ended


def test_the_request_is_what_openai_documents_and_carries_the_key() -> None:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(stream(*GOOD))

    ask(answer, api_key="k", extra_body={"top_k": 4}, temperature=1.0)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer k" in head
    assert msgspec.json.decode(body) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "ignore_eos": True,
        "top_k": 4,
    }


def test_a_connection_is_used_again_and_a_closed_one_is_replaced() -> None:
    connections = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):  # the third request finds a closed connection, or one that ends under it
            await read_request(reader)
            connections[-1] += 1
            writer.write(stream(*GOOD))
            await writer.drain()

    outcomes = ask(answer, count=5)
    assert [outcome.failure for outcome in outcomes] == [None] * 5
    assert connections == [2, 2, 1]


def test_a_connection_that_is_reset_under_a_request_is_replaced_if_it_was_used_before() -> None:
    connections = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        await read_request(reader)
        if len(connections) < 3:
            connections[-1] += 1
            writer.write(stream(*GOOD))
            await writer.drain()
            await read_request(reader)
        reset = struct.pack("ii", 1, 0)  # on, after no time
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()

    outcomes = ask(answer, count=3)
    assert [outcome.failure for outcome in outcomes] == [None, None, why.UNREACHABLE]
    assert "reset" in outcomes[2].detail
    assert connections == [1, 1, 0]


def test_streams_at_once_do_not_mix() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replying(stream(*GOOD), 11)(reader, writer)

    outcomes = ask(answer, count=40, at_once=True)
    assert [outcome.output_tokens for outcome in outcomes if outcome.completed] == [3] * 40


def test_tokens_of_a_chunk_are_known_from_ids_logprobs_or_usage() -> None:
    ids = [token(token_ids=[5]), token(token_ids=[6, 7], finish="length"), usage(3), DONE]
    logprobs = [token(logprobs={"tokens": ["a"]}), token(logprobs={"tokens": ["b", "c"]}), usage(3), DONE]
    running = [token() | {"usage": {"prompt_tokens": 3, "completion_tokens": count}} for count in (1, 3)]
    for events in (ids, logprobs, [*running, usage(3), DONE]):
        (outcome,) = ask(replying(stream(*events)))
        assert outcome.failure is None
        assert [count for _, count in outcome.chunks] == [1, 2]
        assert outcome.chunks_are_tokens


REFUSED = b'{"error": "no, never"}'
REFUSAL = b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b"


def taking(bodies: list[Any], *, refuses: Callable[[Any], bool], status: int = 400) -> Answer:
    """A server that keeps the connection, and refuses what it does not know; the usage so far where it is asked for."""
    running = [usage(2) | token(" a b"), usage(3) | token("", finish="length")]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            bodies.append(msgspec.json.decode((await read_request(reader)).partition(b"\r\n\r\n")[2]))
            asked = "continuous_usage_stats" in bodies[-1]["stream_options"]
            events = running if asked else [token(), token(finish="length")]
            refusal = REFUSAL % (status, len(REFUSED), REFUSED)
            writer.write(refusal if refuses(bodies[-1]) else stream(*events, usage(3), DONE))
            await writer.drain()

    return answer


def asked_for_running_usage(body: Any) -> bool:
    return "continuous_usage_stats" in body["stream_options"]


def test_the_usage_so_far_says_how_many_tokens_a_chunk_has() -> None:
    bodies: list[Any] = []
    for outcome in ask(taking(bodies, refuses=lambda _: False), count=2, running_usage=True):
        assert outcome.failure is None
        assert [count for _, count in outcome.chunks] == [2, 1]
        assert outcome.chunks_are_tokens
    asked = {"include_usage": True, "continuous_usage_stats": True}
    assert [body["stream_options"] for body in bodies] == [asked] * 2


@pytest.mark.parametrize("status", [400, 422])
def test_who_refuses_to_tell_the_usage_so_far_is_asked_without_once_and_for_all(status: int) -> None:
    bodies: list[Any] = []
    outcomes = ask(taking(bodies, refuses=asked_for_running_usage, status=status), count=3, running_usage=True)
    assert [outcome.failure for outcome in outcomes] == [None] * 3
    assert not any(outcome.chunks_are_tokens for outcome in outcomes)  # nobody said, and the report tells
    assert [asked_for_running_usage(body) for body in bodies] == [True, False, False, False]
    assert all(outcome.planned < outcome.sent < outcome.chunks[0][0] for outcome in outcomes)


def test_what_is_refused_either_way_is_a_refusal_and_says_nothing_of_the_usage_so_far() -> None:
    bodies: list[Any] = []
    (outcome,) = ask(taking(bodies, refuses=lambda _: True), running_usage=True)
    assert (outcome.failure, outcome.detail) == ("the server replied 400", "no, never")
    bodies.clear()
    answers = taking(bodies, refuses=lambda _: len(bodies) < 3)
    assert [outcome.completed for outcome in ask(answers, count=2, running_usage=True)] == [False, True]
    assert [asked_for_running_usage(body) for body in bodies] == [True, False, True]


def test_who_has_told_the_usage_so_far_refuses_for_another_reason() -> None:
    bodies: list[Any] = []
    answers = taking(bodies, refuses=lambda _: len(bodies) == 2)
    assert [outcome.completed for outcome in ask(answers, count=3, running_usage=True)] == [True, False, True]
    assert len(bodies) == 3


def test_other_failures_are_not_asked_again() -> None:
    bodies: list[Any] = []
    (outcome,) = ask(taking(bodies, refuses=lambda _: True, status=503), running_usage=True)
    assert outcome.failure == "the server replied 503"
    assert len(bodies) == 1


def test_stream_options_of_ones_own_stand_as_they_are() -> None:
    bodies: list[Any] = []
    own = {"stream_options": {"include_usage": True}}
    outcomes = ask(taking(bodies, refuses=lambda _: True), running_usage=True, extra_body=own)
    assert outcomes[0].failure == "the server replied 400"
    assert [body["stream_options"] for body in bodies] == [{"include_usage": True}]


def test_chunks_that_do_not_say_are_one_token_each_and_it_is_said() -> None:
    (outcome,) = ask(replying(stream(token(), token(finish="length"), usage(3), DONE)))
    assert [count for _, count in outcome.chunks] == [1, 1]
    assert outcome.output_tokens == 3
    assert not outcome.chunks_are_tokens


def test_a_last_token_without_text_comes_with_the_end() -> None:
    (outcome,) = ask(replying(stream(token(), token(), token("", finish="length"), usage(3), DONE)))
    assert len(outcome.chunks) == 3
    assert outcome.chunks_are_tokens


def test_an_end_without_text_is_no_token_of_its_own() -> None:
    (outcome,) = ask(replying(stream(token(), token(), token(), token("", finish="length"), usage(3), DONE)))
    assert len(outcome.chunks) == 3
    assert outcome.chunks_are_tokens


def test_pings_and_other_fields_are_passed_over() -> None:
    body = b": ping\n\nevent: x\n" + b"".join(event(one) for one in GOOD)
    (outcome,) = ask(replying(HEAD + chunk(body) + LAST))
    assert outcome.failure is None


def test_a_stream_without_done_is_complete_only_if_it_says_that_it_is_finished() -> None:
    finished = token(finish="length") | {"usage": {"prompt_tokens": 3, "completion_tokens": 3}}
    assert failure_of(token(), token(), finished) == (None, "")
    assert failure_of(token(), token(), token(), usage(3))[0] == why.BROKEN_OFF
    assert failure_of(token(), token())[0] == why.BROKEN_OFF


def test_what_cannot_be_counted_fails() -> None:
    assert failure_of(token(), token(), token(finish="length"), DONE)[0] == why.NO_USAGE
    assert failure_of(usage(0), DONE)[0] == why.NO_TOKENS


def test_wrong_counts_fail_with_both_numbers() -> None:
    assert failure_of(token(), usage(3, prompt=4), DONE) == (why.PROMPT_MISMATCH, "4 instead of 3")
    assert failure_of(token(), token(), usage(2), DONE) == (why.OUTPUT_MISMATCH, "2 instead of 3")
    assert failure_of(token(), token(), usage(2), DONE, ignore_eos=False) == (None, "")
    assert failure_of(token(), usage(4), DONE, ignore_eos=False) == (why.OUTPUT_MISMATCH, "4 instead of 3")


def test_an_error_in_the_stream_is_never_a_success() -> None:
    error = {"error": {"message": "out of memory", "type": "server_error", "param": None, "code": None}}
    assert failure_of(token(), error) == (why.STREAM_ERROR, "out of memory")
    assert failure_of(token(), error, usage(3), DONE) == (why.STREAM_ERROR, "out of memory")
    assert failure_of(token(), {"error": "short"}) == (why.STREAM_ERROR, "short")
    assert failure_of(token(), b"{nonsense")[0] == why.STREAM_ERROR
    assert failure_of(*(one | {"error": None} for one in GOOD[:-1]), DONE) == (None, "")


def test_a_refusal_says_its_status_and_message() -> None:
    body = b'{"error": {"message": "too long", "type": "invalid_request_error", "param": null, "code": null}}'
    reply = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    (outcome,) = ask(replying(reply))
    assert (outcome.failure, outcome.detail) == ("the server replied 400", "too long")
    (outcome,) = ask(replying(b"HTTP/1.1 500 Oops\r\n\r\nplain words"))
    assert (outcome.failure, outcome.detail) == ("the server replied 500", "plain words")


def test_a_reply_that_is_no_stream_fails() -> None:
    (outcome,) = ask(replying(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"))
    assert (outcome.failure, outcome.detail) == (why.NOT_A_STREAM, "application/json")


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200", b"SSH-2.0-OpenSSH\r\n\r\n"])
def test_a_server_that_is_none_counts_as_unreachable(reply: bytes) -> None:
    (outcome,) = ask(replying(reply))
    assert outcome.failure == why.UNREACHABLE


def test_who_does_not_take_the_connection_in_time_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to have taken longer than a request may."""
    monkeypatch.setattr(stream_client, "CONNECT_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes it, and nobody answers the TLS hello
        target = Target(f"https://127.0.0.1:{silent.getsockname()[1]}", "m")
        outcome = asyncio.run(StreamClient(target).complete(Turn([1], 1, 1)))
    assert outcome.failure == why.UNREACHABLE
    assert "0.2 s" in outcome.detail


def test_nobody_there_is_unreachable() -> None:
    outcome = asyncio.run(StreamClient(Target("http://127.0.0.1:1", "m")).complete(Turn([1], 1, 1)))
    assert outcome.failure == why.UNREACHABLE
    assert "Connect" in outcome.detail


def test_a_broken_connection_in_the_middle_fails() -> None:
    (outcome,) = ask(replying(HEAD + chunk(event(token()))))
    assert outcome.failure == why.BROKEN_OFF


def test_silence_ends_at_the_limit() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up

    (outcome,) = ask(answer, timeout=0.2)
    assert (outcome.failure, outcome.detail) == (why.TIMEOUT, "0.2 s")


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no http or https URL"):
        StreamClient(Target(url, "m"))
