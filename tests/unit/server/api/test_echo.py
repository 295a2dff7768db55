"""`echo`: a prompt of token ids becomes text again, which is work of a request that has its place."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scripted_engine import LiveServer, Script, wait_until

from server.equal_parts import EqualParts

ECHO = {"model": "tiny", "prompt": [104, 105], "echo": True}


@contextmanager
def nothing_decodes(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert server.lifecycle.generator is not None
    with monkeypatch.context() as patch:
        patch.setattr(server.lifecycle.generator.tokenizer, "decode", None)
        yield


def test_token_ids_are_echoed_for_every_choice(server: LiveServer) -> None:
    with server.client() as client:
        reply = client.post("/v1/completions", json={**ECHO, "prompt": [[104, 105], [106]], "n": 2}).json()
    assert [choice["text"] for choice in reply["choices"]] == [f"{text}hello world" for text in ("hi", "hi", "j", "j")]


@pytest.mark.parametrize("fields", [{"n": 100}, {"max_tokens": 10_000}, {"prompt": [104] * 5000}, {"prompt": [600]}])
def test_what_is_refused_is_not_echoed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    with nothing_decodes(server, monkeypatch), server.client() as client:
        assert client.post("/v1/completions", json={**ECHO, **fields}).status_code == 400


def test_a_full_server_does_not_echo(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = server.lifecycle.generator
    assert generator is not None
    monkeypatch.setattr(generator._admission, "_open", EqualParts(1))
    server.engine.script = Script(hold_after=0)
    with server.client() as client, client.stream("POST", "/v1/completions", json={**ECHO, "stream": True}):
        wait_until(lambda: server.engine.held)
        with nothing_decodes(server, monkeypatch):
            assert client.post("/v1/completions", json=ECHO).status_code == 503
        server.engine.resume.set()


def test_an_echo_that_fails_leaves_nothing_open(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = server.lifecycle.generator
    assert generator is not None
    server.engine.script = Script(ends=False)
    with nothing_decodes(server, monkeypatch), server.client() as client:
        assert client.post("/v1/completions", json=ECHO).status_code == 500
        wait_until(lambda: generator.num_active == 0)
