import json

import httpx
from scripted_engine import LiveServer, Script, live_server, wait_until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def lines(reply: httpx.Response) -> list[str]:
    return [line for line in reply.iter_lines() if line]


def test_headers_and_pings_come_while_the_first_token_does_not() -> None:
    with live_server(ping_interval=0.05) as server, server.client() as client:
        server.engine.script = Script(hold_after=0)
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            received = reply.iter_lines()
            assert "assistant" in next(received)
            assert [next(received) for _ in range(5)] == ["", ":", "", ":", ""]
            server.engine.resume.set()
            rest = [line for line in received if line not in ("", ":")]
        assert rest[-1] == "data: [DONE]"


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
            received = [json.loads(line[6:]) for line in lines(reply)[:-1]]
    assert received[-1]["choices"] == []
    assert received[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in received[:-1])
