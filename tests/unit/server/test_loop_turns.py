"""Nothing that a client may send, or ask for, keeps the event loop from all others for long. What it kept it for before
is beside each case, and the limit twice as long or more as it does now."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from loop_turns import TRIES, longest_turn, slowest_turn
from scripted_engine import LiveServer, ScriptedEngine, live_server

from server.api.sse import _event
from server.engine.messages import EngineReady
from server.files.catalog import StoredFile
from server.files.store import FileStore
from server.training import Future, OptimStep, Sampled, SampledSequence, Training

TURN = 0.08  # seconds
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DIGITS = b"9" * 4000
MEMBERS = b",".join(b'"k%d":""' % at for at in range(99_000))
PART = {"type": "text", "text": ""}


def prompt(field: bytes, rest: bytes = b"") -> bytes:
    return b'{"model":"tiny","max_tokens":1' + rest + b',"prompt":' + field + b"}"


BODIES: dict[str, tuple[str, bytes]] = {
    "brackets between strings": (COMPLETIONS, (b"[" * 90_000 + b"]" + b'""') * 45),  # 1.2 s; 4.7 s of a body of 16 MB
    "numbers of many digits": (COMPLETIONS, prompt(b"[" + b",".join([DIGITS] * 2000) + b"]")),  # 0.22 s
    "many strings": (COMPLETIONS, prompt(b"[" + b",".join([b'""'] * 99_000) + b"]")),  # 0.12 s
    "wrong biases": (COMPLETIONS, prompt(b'"x"', b',"logit_bias":{' + MEMBERS + b"}")),  # 1.1 s
    "labels": (COMPLETIONS, prompt(b'"x"', b',"metadata":{' + MEMBERS + b"}")),  # 0.25 s
    "options of a cache": (COMPLETIONS, prompt(b'"x"', b',"prompt_cache_options":{' + MEMBERS + b"}")),  # 0.5 s
    "parts of messages": (
        CHAT,
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": [PART] * 1000}] * 30}).encode(),
    ),  # 0.2 s
    "messages": (CHAT, json.dumps({"model": "tiny", "messages": HELLO["messages"] * 20_000}).encode()),  # 0.14 s
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_is_read_and_checked_beside_the_event_loop(server: LiveServer, name: str) -> None:
    path, body = BODIES[name]
    status, _, slowest = slowest_turn(server, path, body, TURN)
    assert status in (400, 413)
    assert slowest < TURN


DATUM = {
    "model_input": {"chunks": [{"tokens": [1] * 5}] * 3},
    "loss_fn_inputs": {
        "target_tokens": {"data": [1] * 15, "shape": [15]},
        "weights": {"data": [1.5] * 15, "shape": [15]},
    },
}
WRONG_CHUNK = {f"k{at}": 1 for at in range(120)}
MILLIONS = b"1," * 4_000_000 + b"1"
CALLS: dict[str, tuple[str, bytes]] = {
    "data": ("forward", json.dumps({"model_id": "none", "data": [DATUM] * 4096}).encode()),  # 0.4 s
    "wrong chunks": (
        "sample",
        json.dumps({"model_id": "none", "prompt": {"chunks": [WRONG_CHUNK] * 1024}}).encode(),
    ),  # 0.5 s
    "a prompt": ("sample", b'{"model_id":"none","prompt":[' + MILLIONS + b"]}"),  # 0.2 s
    "a chunk": ("sample", b'{"model_id":"none","prompt":{"chunks":[{"tokens":[' + MILLIONS + b"]}]}}"),  # 0.3 s
    "weights": (
        "forward",
        b'{"model_id":"none","data":[{"model_input":[1],"loss_fn_inputs":{"target_tokens":[1],"weights":['
        + MILLIONS
        + b"]}}]}",
    ),  # 0.12 s
}


@pytest.mark.parametrize("name", CALLS)
def test_a_large_call_of_training_is_checked_and_packed_beside_the_event_loop(server: LiveServer, name: str) -> None:
    path, body = CALLS[name]
    status, _, slowest = slowest_turn(server, f"/v1/training/{path}", body, TURN)
    assert status in (400, 404)
    assert slowest < TURN


def test_a_training_prompt_is_no_longer_than_its_schema_says(server: LiveServer) -> None:
    chunks = [{"tokens": [1] * 600_000}] * 2
    with server.client() as client:
        longer = client.post("/v1/training/sample", json={"model_id": "none", "prompt": [1] * 1_048_577})
        together = client.post("/v1/training/sample", json={"model_id": "none", "prompt": {"chunks": chunks}})
    assert longer.json()["error"]["message"] == (
        "Invalid value for 'prompt': List should have at most 1048576 items, not 1048577."
    )
    assert together.json()["error"]["message"] == (
        "Invalid value for 'prompt': the chunks should have at most 1048576 tokens together, not 1200000."
    )


def test_a_result_of_a_million_tokens_is_written_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = SampledSequence(tuple(range(131_072)), (-1.2345678,) * 131_072, "length")
    future = Future("model", 1, OptimStep(0, 0, 0, 0, 0, 0))
    future.end(Sampled((sequence,) * 8))
    monkeypatch.setattr(Training, "future", lambda *_: future)
    body = b'{"request_id":"model:1"}'
    status, reply, slowest = slowest_turn(server, "/v1/training/retrieve_future", body, TURN)  # 0.25 s
    assert (status, reply["type"], len(reply["sequences"])) == (200, "sample", 8)
    assert len(reply["sequences"][7]["tokens"]) == 131_072
    assert slowest < TURN


def test_a_list_of_all_files_is_written_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StoredFile(f"file-{'0' * 32}", "", "fine-tune", "é" * 250, 1, 1, None, None, 1)
    monkeypatch.setattr(FileStore, "page", lambda *_, **__: [file] * 10_001)
    reply, slowest = longest_turn(server, lambda client: client.get("/v1/files"), limit=TURN / 2, tries=TRIES)  # 0.07 s
    assert (len(reply.json()["data"]), reply.json()["has_more"]) == (10_000, True)
    assert slowest < TURN / 2


def test_metrics_are_written_beside_the_event_loop() -> None:
    with live_server() as server:
        for at in range(2000):
            server.lifecycle.metrics.observe_http(f"/{at}", "GET", 200, 1.0)
        reply, slowest = longest_turn(server, lambda client: client.get("/metrics"), limit=TURN, tries=TRIES)  # 0.3 s
    assert 'handler="/1999"' in reply.text
    assert slowest < TURN


class LongEngine(ScriptedEngine):
    async def ready(self) -> EngineReady:
        return msgspec.structs.replace(await super().ready(), max_model_len=2**17, num_blocks=10_000)


@pytest.fixture
def long_server() -> Iterator[LiveServer]:
    with live_server(engine=LongEngine()) as server:
        yield server


def test_many_prompts_are_spelled_one_a_turn(server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": [[1] * 4090] * 128, "max_tokens": 1, "echo": True}
    status, reply, slowest = slowest_turn(server, COMPLETIONS, json.dumps(body).encode(), TURN / 2)  # 0.07 s
    assert (status, len(reply["choices"]), len(reply["choices"][127]["text"])) == (200, 128, 4091)
    assert slowest < TURN / 2


def test_echoed_prompts_are_written_one_a_turn(long_server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": [[1] * 2**16] * 16, "n": 8, "max_tokens": 1, "echo": True}
    status, reply, slowest = slowest_turn(long_server, COMPLETIONS, json.dumps(body).encode(), TURN)  # 0.15 s
    texts = [choice["text"] for choice in reply["choices"]]
    assert (status, texts) == (200, ["\x01" * 2**16 + "h"] * 128)
    assert slowest < TURN


def test_a_long_event_is_looked_through_for_line_ends_quickly() -> None:
    for _ in range(TRIES):
        before = time.thread_time()
        event = _event("漢" * 2_000_000 + "\u0085\u2028\u2029")  # 0.26 s
        taken = time.thread_time() - before
        if taken < TURN:
            break
    assert event.endswith(rb"\u0085\u2028\u2029" + b"\n\n")
    assert taken < TURN


def test_whoever_is_first_to_ask_waits_for_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "live", lambda *_: [])
    with live_server() as server:
        reply, slowest = longest_turn(server, lambda client: client.get("/v1/training/models"))  # 0.12 s
    assert reply.status_code == httpx.codes.OK
    assert slowest < TURN / 2
