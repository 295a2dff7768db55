import json
from typing import Any

import httpx
import pytest
from scripted_engine import LiveServer, Script, live_server, wait_until

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def lines(reply: httpx.Response) -> list[str]:
    return [line for line in reply.iter_lines() if line]


def test_headers_and_pings_come_while_the_first_token_does_not() -> None:
    with live_server(ping_interval=0.05) as server, server.client() as client:
        server.engine.script = Script(hold_after=0)
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            received = reply.iter_lines()
            assert [next(received) for _ in range(6)] == [":", "", ":", "", ":", ""]
            server.engine.resume.set()
            rest = [line for line in received if line not in ("", ":")]
        assert "assistant" in rest[0]
        assert rest[-1] == "data: [DONE]"


def test_a_line_comes_where_it_is_silent_and_the_role_with_the_first_token() -> None:
    with live_server(ping_interval=0.1) as server, server.client() as client:
        server.engine.script = Script(hold_after=0)
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "n": 2}) as reply:
            received = reply.iter_lines()
            assert next(received) == ":"
            server.engine.resume.set()
            choices = [json.loads(line[6:])["choices"][0] for line in received if line.startswith("data: {")]
    for index in (0, 1):
        first, second = [at for at, choice in enumerate(choices) if choice["index"] == index][:2]
        assert choices[first]["delta"] == {"role": "assistant", "content": ""}
        assert (second, choices[second]["delta"]) == (first + 1, {"content": "h"})
    assert len([choice for choice in choices if "role" in choice["delta"]]) == 2


def test_an_echo_comes_with_the_first_token_of_its_choice() -> None:
    body = {"model": "tiny", "prompt": ["hi ", "ho "], "echo": True, "stream": True}
    with live_server(ping_interval=0.1) as server, server.client() as client:
        server.engine.script = Script(hold_after=0)
        with client.stream("POST", "/v1/completions", json=body) as reply:
            received = reply.iter_lines()
            assert next(received) == ":"
            server.engine.resume.set()
            choices = [json.loads(line[6:])["choices"][0] for line in received if line.startswith("data: {")]
    for index, echo in enumerate(("hi ", "ho ")):
        texts = [choice["text"] for choice in choices if choice["index"] == index]
        assert (texts[0], "".join(texts)) == (echo, f"{echo}hello world")


def test_a_failure_before_any_token_is_an_error_without_a_role(server: LiveServer) -> None:
    server.engine.script = Script(fail_after=0)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
        received = lines(reply)
    assert [line[:9] for line in received] == ['data: {"e']


def test_text_held_back_for_a_stop_string_does_not_silence_pings() -> None:
    with live_server(ping_interval=0.05) as server, server.client() as client:
        server.engine.script = Script(text=b"ab", hold_after=2)
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stop": "abc"}) as reply:
            received = reply.iter_lines()
            while next(received) != ":":
                pass
            server.engine.resume.set()
            text = "".join(
                choice["delta"].get("content", "")
                for line in received
                if line.startswith("data: {")
                for choice in json.loads(line[6:])["choices"]
            )
        assert text == "ab"


def test_a_text_with_ends_of_lines_of_unicode_stays_one_line() -> None:
    text = "a\u2028b\u2029c\x85d\u00e9"
    with live_server() as server, server.client() as client:
        server.engine.script = Script(text=text.encode())
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            events = [json.loads(line[6:]) for line in lines(reply) if line.startswith("data: {")]
    assert "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"]) == text


def test_done_comes_only_after_success(server: LiveServer) -> None:
    with server.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            assert lines(reply)[-1] == "data: [DONE]"
        server.engine.script = Script(fail_after=2)
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            received = lines(reply)
    assert received[-1].startswith('data: {"error":')
    error = json.loads(received[-1][6:])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "[DONE]" not in "".join(received)


def test_refusals_before_the_stream_are_statuses_not_events(server: LiveServer) -> None:
    with server.client() as client:
        reply = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 10_000})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_full_server_refuses_before_tokenising() -> None:
    with live_server(max_num_seqs=1, max_queued_requests=1) as server, server.client() as client:
        server.engine.script = Script(hold_after=0)
        generator = server.lifecycle.generator
        assert generator is not None
        with (
            client.stream("POST", "/v1/chat/completions", json=CHAT),
            client.stream("POST", "/v1/chat/completions", json=CHAT),
        ):
            wait_until(lambda: len(server.engine.held) == 2)
            encode = generator.tokenizer.encode
            generator.tokenizer.encode = None  # type: ignore[method-assign,assignment]  # whoever tokenises now fails
            reply = client.post("/v1/chat/completions", json=CHAT)
            generator.tokenizer.encode = encode  # type: ignore[method-assign]
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "server_is_overloaded"
            assert reply.json()["error"]["type"] == "service_unavailable_error"
            assert 1 <= int(reply.headers["retry-after"]) <= 10
        wait_until(lambda: generator.num_active == 0)


def test_an_engine_that_restarts_is_503() -> None:
    with live_server() as server, server.client() as client:
        server.engine.is_ready = False
        reply = client.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert client.get("/health/ready").status_code == 503


def test_usage_chunk_is_last_and_alone(server: LiveServer) -> None:
    server.engine.script = Script(cached=1)
    with server.client() as client:
        body = {"model": "tiny", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            received = [json.loads(line[6:]) for line in lines(reply)[1:-1]]
    assert received[-1]["choices"] == []
    assert received[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in received[:-1])


@pytest.mark.parametrize("ask", [{"messages": CHAT["messages"]}, {"prompt": "hi", "echo": True}])
@pytest.mark.parametrize("logprobs", [False, True])
def test_continuous_usage_is_in_every_chunk_and_grows(server: LiveServer, ask: dict[str, Any], logprobs: bool) -> None:
    path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
    if logprobs:
        ask = {"messages": ask["messages"], "logprobs": True} if "messages" in ask else {"prompt": "hi", "logprobs": 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.client() as client:
        body = {"model": "tiny", "stream": True, **ask}
        with client.stream("POST", path, json=body | {"stream_options": options}) as reply:
            received = [json.loads(line[6:]) for line in lines(reply) if line.startswith("data: {")]
        with client.stream("POST", path, json=body) as reply:
            plain = [json.loads(line[6:]) for line in lines(reply) if line.startswith("data: {")]
    assert [chunk["choices"] for chunk in received[:-1]] == [chunk["choices"] for chunk in plain]
    counts = [chunk["usage"]["completion_tokens"] for chunk in received]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 12
    prompt_tokens = len(server.engine.requests[0].prompt_token_ids)
    for usage in (chunk["usage"] for chunk in received):
        assert usage["prompt_tokens"] == prompt_tokens
        assert usage["total_tokens"] == prompt_tokens + usage["completion_tokens"]


def test_continuous_usage_tells_what_is_generated_so_far(server: LiveServer) -> None:
    server.engine.script = Script(hold_after=5)
    options = {"include_usage": True, "continuous_usage_stats": True}
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream_options": options}) as reply,
    ):
        received = (line for line in reply.iter_lines() if line.startswith("data: {"))
        chunks = [json.loads(next(received)[6:]) for _ in range(6)]  # the role, and five tokens
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        server.engine.resume.set()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"continuous_usage_stats": True}, 0),  # as with vLLM
        ({"include_usage": False, "continuous_usage_stats": True}, 0),
        ({"include_usage": True, "continuous_usage_stats": False}, 1),
    ],
)
def test_continuous_usage_needs_include_usage(server: LiveServer, options: dict[str, bool], told: int) -> None:
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream_options": options}) as reply,
    ):
        received = [json.loads(line[6:]) for line in lines(reply) if line.startswith("data: {")]
    assert len([chunk for chunk in received if chunk.get("usage")]) == told
