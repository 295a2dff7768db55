"""`echo` with `logprobs`: a prompt's own log-probabilities, as OpenAI's first API gave them, and as benchmarks that
compare likelihoods read them."""

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import httpx
import pytest
from scripted_engine import LiveServer, Script, scored, wait_until

from server.api import reply_memory
from server.equal_parts import EqualParts
from server.text import prompt_memory

HELLO = list(b"hello")
SCORED = {"model": "tiny", "prompt": HELLO, "echo": True, "logprobs": 1, "temperature": 0}


def post(server: LiveServer, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        reply = client.post("/v1/completions", json={**SCORED, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def streamed(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        text = client.post("/v1/completions", json={**SCORED, "stream": True, **fields}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_prompt_alone_is_scored_where_no_token_is_asked_for(server: LiveServer) -> None:
    reply = post(server, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["h", "e", "l", "l", "o"],
        "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0],
        "top_logprobs": [None, {"e": -1.0}, {"l": -2.0}, {"l": -3.0}, {"o": -4.0}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 1, 1)


def test_the_answer_s_log_probabilities_follow_the_prompt_s(server: LiveServer) -> None:
    (choice,) = post(server, max_tokens=2, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hellohe"
    assert logprobs["tokens"] == [*"hellohe"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -0.5, -0.5]
    assert logprobs["top_logprobs"][1] == {"e": -1.0, "f": -2.0}
    assert logprobs["top_logprobs"][-1] == {"e": -0.5, "f": -1.5}
    assert logprobs["text_offset"] == list(range(7))


def test_whoever_counts_from_the_end_finds_the_prompt_also_where_the_answer_ends_at_once(server: LiveServer) -> None:
    """lm-evaluation-harness asks for one token and leaves out the last entry: that of an end token must be there."""
    server.engine.script = Script(text=b"")
    for fields in ({}, {"stop": ["!"]}):
        (choice,) = post(server, max_tokens=1, **fields)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
        assert choice["logprobs"]["tokens"] == [*"hello", "<|im_end|>"]
        assert choice["logprobs"]["token_logprobs"][:-1] == [None, -1.0, -2.0, -3.0, -4.0]
        assert choice["logprobs"]["text_offset"][-1] == 5


def log_likelihoods(reply: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As lm-evaluation-harness's `local-completions` reads them."""
    found = []
    for choice, length in zip(sorted(reply["choices"], key=itemgetter("index")), context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def test_likelihoods_of_a_batch_of_prompts_are_read_as_benchmarks_read_them(server: LiveServer) -> None:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    with server.client() as client:
        reply = client.post("/v1/completions", json={**body, "prompt": [HELLO, list(b"hey"), list(b"hi you")]}).json()
    assert log_likelihoods(reply, [2, 1, 3]) == [(-2 - 3 - 4, True), (-1 - 2, True), (-3 - 4 - 5, True)]


def test_every_choice_of_every_prompt_has_its_prompt_s(server: LiveServer) -> None:
    choices = post(server, prompt=["hi", "you"], n=2, max_tokens=1)["choices"]
    assert [choice["logprobs"]["tokens"][:-1] for choice in choices] == [[*"hi"], [*"hi"], [*"you"], [*"you"]]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices[::2]] == [[None, -1, -0.5], [None, -1, -2, -0.5]]


def in_order(replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices of prompts that were asked one by one, as one request for all of them has them."""
    return [choice | {"index": index} for index, choice in enumerate(c for reply in replies for c in reply["choices"])]


CHOICES = [{"n": 1}, {"n": 3}, {"n": 3, "best_of": 3}]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("fields", CHOICES)
def test_a_prompt_is_scored_once_for_all_of_its_choices(
    server: LiveServer, fields: dict[str, int], max_tokens: int
) -> None:
    prompts, n = ["hi", [104], HELLO], fields["n"]
    for prompt in prompts:
        choices = post(server, prompt=prompt, max_tokens=max_tokens, **fields)["choices"]
        assert scored(server) == [1] + [None] * (n - 1)
        (alone,) = post(server, prompt=prompt, max_tokens=max_tokens)["choices"]
        assert choices == [alone | {"index": index} for index in range(n)]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("fields", CHOICES)
def test_each_choice_of_a_stream_says_what_it_says_whole(
    server: LiveServer, fields: dict[str, int], max_tokens: int
) -> None:
    prompts = ["h", "hi", "hello you"]
    expected = in_order([post(server, prompt=prompt, max_tokens=max_tokens, **fields) for prompt in prompts])
    assert post(server, prompt=prompts, max_tokens=max_tokens, **fields)["choices"] == expected
    chunks = [chunk["choices"][0] for chunk in streamed(server, prompt=prompts, max_tokens=max_tokens, **fields)]
    assert scored(server) == ([1] + [None] * (fields["n"] - 1)) * 3
    for choice in expected:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own if chunk["logprobs"] for value in chunk["logprobs"][name]] == values


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_says_the_same(server: LiveServer, max_tokens: int) -> None:
    (whole,) = post(server, max_tokens=max_tokens)["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(server, max_tokens=max_tokens)]
    assert chunks[0]["text"] == "hello"
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]] == values
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_a_prompt_of_one_token_has_nothing_before_it(server: LiveServer) -> None:
    (choice,) = post(server, prompt=[104], max_tokens=0, logprobs=0)["choices"]
    assert choice["text"] == "h"
    assert choice["logprobs"] == {"tokens": ["h"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


def test_without_logprobs_a_prompt_is_echoed_and_nothing_scored(server: LiveServer) -> None:
    (choice,) = post(server, max_tokens=0, logprobs=None)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("hello", None, "length")
    chunks = [chunk["choices"][0] for chunk in streamed(server, max_tokens=0, logprobs=None)]
    assert "".join(chunk["text"] for chunk in chunks) == "hello"
    assert server.engine.requests[-1].sampling.prompt_logprobs is None


def test_without_echo_a_prompt_is_not_scored(server: LiveServer) -> None:
    (choice,) = post(server, echo=False, max_tokens=1)["choices"]
    assert choice["logprobs"]["tokens"] == ["h"]
    assert server.engine.requests[-1].sampling.prompt_logprobs is None


def test_no_token_without_echo_is_refused_in_words(server: LiveServer) -> None:
    with server.client() as client:
        reply = client.post("/v1/completions", json={**SCORED, "echo": False, "max_tokens": 0})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "max_tokens")
    assert "only allowed when echo is true" in error["message"]


def test_a_scored_prompt_leaves_room_for_a_token(server: LiveServer) -> None:
    with server.client() as client:
        fits = client.post("/v1/completions", json={**SCORED, "prompt": [104] * 4095, "max_tokens": 0})
        reply = client.post("/v1/completions", json={**SCORED, "prompt": [104] * 4096, "max_tokens": 0})
    assert len(fits.json()["choices"][0]["logprobs"]["tokens"]) == 4095
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def refusal(client: httpx.Client, **fields: Any) -> tuple[int, dict[str, Any]]:
    reply = client.post("/v1/completions", json={**SCORED, **fields})
    return reply.status_code, reply.json()["error"]


def test_a_smallest_number_of_tokens_that_is_none_at_all_is_refused(server: LiveServer) -> None:
    with server.client() as client:
        status, error = refusal(client, max_tokens=0, min_tokens=1)
    assert (status, error["param"]) == (400, "min_tokens")


def test_prompts_count_as_what_a_reply_holds(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "ONE_BYTES", 2000)
    with server.client() as client:
        status, error = refusal(client, prompt=[104 + at % 7 for at in range(3000)], max_tokens=0)
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "logprobs")
    assert len(streamed(server, prompt=[104] * 3000, max_tokens=0)) > 3


def test_more_than_is_kept_between_the_engine_and_a_reply_is_refused_before_it_is_computed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 tokens with an alternative each: 16 bytes a token, whatever the number of choices."""
    monkeypatch.setattr(prompt_memory, "ONE_BYTES", 80)
    generator = server.lifecycle.generator
    assert generator is not None
    with server.client() as client:
        assert client.post("/v1/completions", json={**SCORED, "n": 2}).status_code == 200
        for fields in ({"logprobs": 2}, {"prompt": [HELLO, HELLO]}, {"stream": True, "logprobs": 2}):
            status, error = refusal(client, **fields)
            assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "logprobs")
        assert len(server.engine.requests) == 2
        monkeypatch.setattr(generator._prompt_memory, "_held", EqualParts(80))
        server.engine.script = Script(hold_after=0)
        with client.stream("POST", "/v1/completions", json={**SCORED, "stream": True}):
            wait_until(lambda: server.engine.held)
            status, error = refusal(client)
            assert (status, error["code"]) == (503, "server_is_overloaded")
            server.engine.resume.set()
        wait_until(lambda: generator._prompt_memory._held.held == 0)
        assert client.post("/v1/completions", json=SCORED).status_code == 200
