"""A client that goes away leaves nothing running and no KV block taken, wherever its request was."""

import contextlib

import httpx
import pytest

from ..questions import LONG_QUESTION, MODEL
from ..server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = '"delta":{"content":'  # of a token: the opening chunk has a role in front
MANY = 700  # tokens: minutes of work, were it not cancelled


def body(*, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": LONG_QUESTION}]
    return {"model": MODEL, "messages": messages, "max_tokens": MANY, "ignore_eos": True, "stream": stream}


def generated(server: ServerProcess) -> float:
    return server.metrics()["longwave:generation_tokens_total"]


def test_mid_stream(server: ServerProcess) -> None:
    before = generated(server)

    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body(stream=True), timeout=60) as reply:
        lines = reply.iter_lines()
        wait_until(lambda: TEXT in next(lines), "the first text")

    server.wait_until_idle()
    assert generated(server) - before < MANY / 2


def test_while_waiting_for_a_whole_answer(server: ServerProcess) -> None:
    before = generated(server)

    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body(stream=False), timeout=1.0)

    server.wait_until_idle()
    assert generated(server) - before < MANY / 2


def test_before_the_first_token(chunking_server: ServerProcess) -> None:
    """The prompt takes a dozen steps there; the stream's headers come at once."""
    before = generated(chunking_server)
    url, headers = f"{chunking_server.url}/v1/chat/completions", chunking_server.headers

    with httpx.stream("POST", url, json=body(stream=True), headers=headers, timeout=60) as reply:
        assert reply.status_code == 200

    chunking_server.wait_until_idle()
    assert generated(chunking_server) - before < MANY / 2


def test_of_several_choices(server: ServerProcess) -> None:
    several = body(stream=True) | {"n": 4, "temperature": 1.0}

    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=several, timeout=60) as reply:
        lines = reply.iter_lines()
        wait_until(lambda: TEXT in next(lines), "the first text")

    server.wait_until_idle()
