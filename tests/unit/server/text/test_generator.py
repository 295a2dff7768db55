import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from scripted_engine import MAX_MODEL_LEN, LiveServer, wait_until

from models.batch import SamplingParams
from server.text import generator
from server.text.generation import Job
from server.text.generator import LIKELY_CHARACTERS
from server.text.tokenizer import INLINE_CHARACTERS

NUM_PROMPTS = 32
USER = {"role": "user"}


def test_many_short_prompts_leave_the_event_loop_its_turns(server: LiveServer) -> None:
    opened = server.lifecycle.generator
    assert opened is not None
    job = Job("job", ("hi",) * NUM_PROMPTS, SamplingParams(), max_tokens=1, arrival_time=time.monotonic())

    async def turns_while_opening() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        generation = await opened.open(job)
        counting.cancel()
        await generation.aclose()
        return turns

    assert server.run(turns_while_opening()) >= NUM_PROMPTS


@pytest.mark.parametrize(("unit", "size"), [("<|im_start|>", 24 * MAX_MODEL_LEN), ("x<|", 12 * MAX_MODEL_LEN)])
@pytest.mark.parametrize("chat", [True, False])
def test_a_text_that_no_tokens_could_make_fit_is_refused_before_it_is_encoded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, chat: bool, unit: str, size: int
) -> None:
    assert server.lifecycle.generator is not None
    tokenizer = server.lifecycle.generator.tokenizer
    encoded: list[str] = []
    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(tokenizer, name, lambda text, **_: encoded.append(text) or [1])
    # Of the longest tokens it would have too many; or they are so short that a part of it has.
    text = unit * (size // len(unit))
    path, field = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
    prompt = [{"role": "user", "content": text}] if chat else text
    with server.client() as client:
        reply = client.post(path, json={"model": "tiny", field: prompt, "max_tokens": 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "at least" in error["message"]
    assert not encoded


def test_tokens_are_given_of_texts_beyond_the_context_up_to_a_limit(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "MOST_TOKENIZED", 2 * MAX_MODEL_LEN)
    with server.client() as client:
        assert client.post("/tokenize", json={"prompt": "x" * 2 * MAX_MODEL_LEN}).json()["count"] == 2 * MAX_MODEL_LEN
        for field, text in (
            ("prompt", "x" * (2 * MAX_MODEL_LEN + 1)),
            ("messages", [USER | {"content": "x" * 15 * MAX_MODEL_LEN}]),
        ):
            reply = client.post("/tokenize", json={field: text})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (413, "payload_too_large", field)
            assert f"{2 * MAX_MODEL_LEN} are served" in error["message"]


def test_the_tokens_of_a_text_are_not_sought_where_each_would_be_very_long(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "MOST_TOKENIZED", MAX_MODEL_LEN)
    most = LIKELY_CHARACTERS * MAX_MODEL_LEN
    text = "<|endoftext|>" * (most // len("<|endoftext|>"))
    with server.client() as client:
        assert client.post("/tokenize", json={"prompt": text}).json()["count"] < MAX_MODEL_LEN
        reply = client.post("/tokenize", json={"prompt": text + "<|endoftext|>"})
    assert reply.status_code == 413
    assert f"{most} are served" in reply.json()["error"]["message"]


@pytest.mark.parametrize("text", ["x" * 2**18, "<|im_end|>" * 2**16])
def test_a_text_of_usual_length_with_too_many_tokens_is_refused_before_it_is_encoded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert server.lifecycle.generator is not None
    tokenizer = server.lifecycle.generator.tokenizer
    encoded: list[str] = []
    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(tokenizer, name, lambda text, **_: encoded.append(text) or [1])
    monkeypatch.setattr(generator, "MOST_TOKENIZED", 2**17)
    with server.client() as client:
        assert client.post("/tokenize", json={"messages": [USER | {"content": text}]}).status_code == 413
        assert not encoded
        assert client.post("/tokenize", json={"messages": [USER | {"content": "he" * 2**16}]}).json()["count"] == 1
    assert len(encoded) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_no_answer_waits_for_texts_that_need_not_fit(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert server.lifecycle.generator is not None
    tokenizer = server.lifecycle.generator.tokenizer
    in_thread, go_on, entered = tokenizer.in_thread, threading.Event(), []

    def entering(*args: Any, **options: Any) -> Any:
        work = asyncio.ensure_future(in_thread(*args, **options))
        work.get_loop().call_soon(lambda: entered.append(work))  # after its first step: then a thread has it
        return work

    def endless(inner: Callable[..., Any], size: int) -> Callable[..., Any]:
        def work(given: Any, **options: Any) -> Any:
            if len(given) == size:
                go_on.wait()
            return inner(given, **options)

        return work

    monkeypatch.setattr(tokenizer, "in_thread", entering)
    size = 10 * MAX_MODEL_LEN
    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, endless(getattr(tokenizer, name), size))
    body = {"prompt": "x" * size} if path == "/tokenize" else {"tokens": [1] * size}
    with server.client() as client, ThreadPoolExecutor(3) as callers:
        asked = [callers.submit(client.post, path, json=body) for _ in range(3)]
        try:
            wait_until(lambda: len(entered) == 3)
            prompt = "ll" * (INLINE_CHARACTERS // 2 + 1)  # half as many tokens
            assert client.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).status_code == 200
        finally:
            go_on.set()
        assert [reply.result().status_code for reply in asked] == [200] * 3


def test_a_text_of_the_longest_tokens_that_fits_is_served(server: LiveServer) -> None:
    text = "<|endoftext|>" * (MAX_MODEL_LEN - 1)  # the vocabulary has no longer token
    with server.client() as client:
        reply = client.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1
