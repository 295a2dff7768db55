"""Bodies of megabytes: read as small ones are, refused where they have too many values, and never at once."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_turns import TRIES, slowest_turn, watched
from scripted_engine import LiveServer

from server import large_json, strict_json
from server.engine.token_ids import TokenIds
from server.errors import PayloadTooLarge
from server.large_json import LONG_LIST_BYTES, SMALL_BYTES, loads

MOST = 1000
LONG = list(range(LONG_LIST_BYTES))
FILLER = " " * SMALL_BYTES
MILLIONS = b"1," * 4_000_000 + b"1"
PATIENCE = 0.15  # seconds of the loop's thread: to read these bodies at once takes twice as much


def read(body: str | bytes, most: int = MOST) -> Any:
    return asyncio.run(loads(body if isinstance(body, bytes) else body.encode(), most))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | TokenIds) else value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5) | st.just(LONG),
    max_leaves=8,
)


@given(JSON, st.booleans())
def test_a_large_body_says_what_it_would_say_to_the_strict_reader(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert plain(read(text + FILLER)) == strict_json.loads(text)


@given(st.lists(st.sampled_from(["\\\\", '\\"', "\\n", "a", "[", "1,"]), max_size=40), st.integers(1, 9))
def test_strings_end_where_they_do_wherever_one_stops_to_look(escaped: list[str], look_bytes: int) -> None:
    text = '{"a":"' + "".join(escaped) + '","b":[1,2,3]}'
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOOK_BYTES", look_bytes), ("SMALL_BYTES", 0), ("LONG_LIST_BYTES", 4)):
            patch.setattr(large_json, name, value)
        body = read(text)
    assert isinstance(body["b"], TokenIds)
    assert plain(body) == json.loads(text)


@pytest.mark.parametrize("escaped", ["\\\\", '\\"'])
def test_millions_of_escapes_are_looked_through_a_little_at_a_time(escaped: str) -> None:
    body = ('{"a":"' + escaped * 16_000_000 + '"}').encode()
    for _ in range(TRIES):
        value, slowest = asyncio.run(watched(loads(body, MOST)))
        if slowest < PATIENCE / 2:
            break
    assert value == {"a": escaped[1] * 16_000_000}
    assert slowest < PATIENCE / 2  # at once it were 0.2 s


def test_long_lists_of_token_ids_are_packed_and_short_ones_are_not() -> None:
    body = read(json.dumps({"a": [LONG, [1, 2]], "b": LONG, "c": "[" + ",".join(map(str, LONG)) + "]"}) + FILLER)
    assert isinstance(body["a"][0], TokenIds)
    assert isinstance(body["b"], TokenIds)
    assert plain(body) == {"a": [LONG, [1, 2]], "b": LONG, "c": "[" + ",".join(map(str, LONG)) + "]"}
    assert isinstance(body["a"][1], list)


NO_JSON = {
    "a last comma": "[" + "1," * SMALL_BYTES + "]",
    "a comma too many": "[" + "1," * SMALL_BYTES + ",1]",
    "a leading zero": "[" + "1," * SMALL_BYTES + "01]",
    "a number before a list": "1[" + "1," * SMALL_BYTES + "1]",
    "a number behind a list": "[" + "1," * SMALL_BYTES + "1]1",
    "two lists": ("[" + "1," * SMALL_BYTES + "1]") * 2,
    "no end": "[" + "1," * SMALL_BYTES,
    "no end of a string": '"' + "x" * SMALL_BYTES,
    "an escaped end": '"' + "x" * SMALL_BYTES + '\\"',
    "a key twice": '{"a":[' + "1," * SMALL_BYTES + '1],"a":1}',
    "NaN": "[NaN]" + FILLER,
}


@pytest.mark.parametrize("name", NO_JSON)
def test_what_is_no_json_is_refused_however_long_its_lists_are(name: str) -> None:
    with pytest.raises(ValueError):
        read(NO_JSON[name], most=10**6)


TOO_MANY = {
    "lists": b"[" + b"[]," * SMALL_BYTES + b"[]]",
    "open lists": b"[" * 2 * SMALL_BYTES,
    "objects": b"[" + b"{}," * SMALL_BYTES + b"{}]",
    "strings": b"[" + b'"",' * SMALL_BYTES + b'""]',
    "members": b"{" + b",".join(b'"%d":0' % at for at in range(SMALL_BYTES)) + b"}",
    "numbers": b"[" + b"1.5," * SMALL_BYTES + b"1]",
    "ids that are none": b"[" + b"4294967296," * SMALL_BYTES + b"1]",
    "negative numbers": b"[" + b"-1," * SMALL_BYTES + b"1]",
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_values_than_anybody_needs_are_refused_unread(name: str) -> None:
    with pytest.raises(PayloadTooLarge, match="more than 1000 values"):
        read(TOO_MANY[name])


@pytest.mark.parametrize("text", ["," * 10**6, "[" * 10**6, '\\"' * 10**6, "\\\\" * 10**6, '\\\\\\",[' * 10**5])
def test_what_stands_in_a_string_is_not_counted(text: str) -> None:
    body = '{"a":"' + text + '"}'
    assert read(body) == json.loads(body)


@pytest.mark.parametrize("echo", [b"true", b"false"])
def test_millions_of_token_ids_leave_the_event_loop_its_turns(server: LiveServer, echo: bytes) -> None:
    body = b'{"model":"tiny","max_tokens":1,"echo":' + echo + b',"prompt":[' + MILLIONS + b"]}"
    status, reply, slowest = slowest_turn(server, "/v1/completions", body, PATIENCE)
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert slowest < PATIENCE


def test_millions_of_token_ids_are_decoded_beside_the_event_loop(server: LiveServer) -> None:
    status, reply, slowest = slowest_turn(server, "/detokenize", b'{"tokens":[' + MILLIONS + b"]}", PATIENCE)
    assert (status, reply["prompt"][:3], len(reply["prompt"])) == (200, "\x01" * 3, 4_000_001)
    assert slowest < PATIENCE


@pytest.mark.parametrize(
    "field",
    [b'"metadata":[' + b"[]," * 10**6 + b"1]", b'"prompt":[' + b"{}," * 10**6 + b"1]"],
    ids=["lists", "objects"],
)
def test_millions_of_values_are_refused_at_once(server: LiveServer, field: bytes) -> None:
    status, reply, slowest = slowest_turn(server, "/v1/completions", b'{"model":"tiny",' + field + b"}", PATIENCE)
    assert (status, reply["error"]["code"]) == (413, "payload_too_large")
    assert slowest < PATIENCE


def test_a_long_list_where_none_belongs_is_named(server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "x" * SMALL_BYTES, "stop_token_ids": LONG}
    with server.client() as client:
        error = client.post("/v1/completions", json=body).json()["error"]
    assert error["message"] == f"Invalid value for 'stop_token_ids': List should have fewer items than {len(LONG)}."


def test_a_long_prompt_of_token_ids_is_the_prompt_it_says(server: LiveServer) -> None:
    prompt = [at % 256 for at in range(4000)]
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}) + FILLER
    with server.client() as client:
        reply = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert list(server.engine.requests[0].prompt_token_ids) == prompt


def test_a_training_call_may_have_as_many_numbers_as_it_may_have_tokens(server: LiveServer) -> None:
    tokens = server.lifecycle.settings.max_training_call_tokens
    inputs = {"target_tokens": [1] * tokens, "weights": [1] * tokens, "advantages": [0.5] * tokens}
    datum = {"model_input": [1] * tokens, "loss_fn_inputs": {**inputs, "logprobs": [-1.5] * tokens}}
    call = {"model_id": "none", "data": [datum], "loss_fn": "importance_sampling"}
    with server.client() as client:
        read = client.post("/v1/training/forward", json=call)
        refused = client.post("/v1/training/forward", json={**call, "data": [datum] * 3})
    assert read.status_code == 404, read.text  # there is no such model
    assert refused.status_code == 413
