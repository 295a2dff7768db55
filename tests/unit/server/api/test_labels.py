"""Fields that label a request change no answer; they are checked all the same."""

from typing import Any

import pytest
from scripted_engine import LiveServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
}
LABELS: dict[str, Any] = {
    "user": "u" * 512,
    "metadata": {str(number): "v" * 512 for number in range(16)},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "parallel_tool_calls": False,
}
WRONG: list[tuple[str, Any, str]] = [
    ("user", 5, "user"),
    ("user", "u" * 513, "user"),
    ("metadata", "a", "metadata"),
    ("metadata", {str(number): "v" for number in range(17)}, "metadata"),
    ("metadata", {"k" * 65: "v"}, "metadata"),
    ("metadata", {"k": "v" * 513}, "metadata.k"),
    ("metadata", {"k": 1}, "metadata.k"),
    ("metadata", {"k": "v\0"}, "metadata.k"),
    ("store", "yes", "store"),
    ("service_tier", 1, "service_tier"),
    ("safety_identifier", [], "safety_identifier"),
    ("prompt_cache_key", "k" * 513, "prompt_cache_key"),
    ("prompt_cache_retention", 24, "prompt_cache_retention"),
    ("prompt_cache_options", "explicit", "prompt_cache_options"),
    ("prompt_cache_options", {"ttl": ["30m"]}, "prompt_cache_options.ttl"),
    ("prompt_cache_options", {"mode": "m" * 513}, "prompt_cache_options.mode"),
    ("prompt_cache_options", {str(number): "v" for number in range(17)}, "prompt_cache_options"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"),
]


@pytest.mark.parametrize("path", BODIES)
def test_labels_are_accepted_and_change_nothing(server: LiveServer, path: str) -> None:
    with server.client() as client:
        assert client.post(path, json=BODIES[path] | LABELS).status_code == 200
        assert client.post(path, json=BODIES[path]).status_code == 200
        assert client.post(path, json=BODIES[path] | dict.fromkeys(LABELS)).status_code == 200
    labelled, plain, null = (request.sampling for request in server.engine.requests)
    assert labelled == plain == null


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("field", "value", "named"), WRONG)
def test_labels_of_a_wrong_type_or_out_of_bounds_are_400_and_named(
    server: LiveServer, path: str, field: str, value: Any, named: str
) -> None:
    with server.client() as client:
        reply = client.post(path, json=BODIES[path] | {field: value})

    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"] or "").startswith(named)
    assert server.engine.requests == []


def test_the_options_of_a_stream_are_checked_too(server: LiveServer) -> None:
    body = BODIES["/v1/completions"] | {"stream": True}
    with server.client() as client:
        assert client.post("/v1/completions", json=body | {"stream_options": {"include_obfuscation": False}}).is_success
        reply = client.post("/v1/completions", json=body | {"stream_options": {"include_obfuscation": "no"}})

    assert reply.status_code == 400, reply.text


def test_a_breakpoint_of_the_cache_changes_no_prompt_and_is_checked(server: LiveServer) -> None:
    def body(**fields: Any) -> dict[str, Any]:
        part = {"type": "text", "text": "hi"}
        return {"model": "tiny", "messages": [{"role": "user", "content": [part | fields]}]}

    with server.client() as client:
        for fields in ({}, {"prompt_cache_breakpoint": {"mode": "explicit"}}, {"prompt_cache_breakpoint": None}):
            assert client.post("/v1/chat/completions", json=body(**fields)).status_code == 200
        reply = client.post("/v1/chat/completions", json=body(prompt_cache_breakpoint="explicit"))

    assert len({tuple(request.prompt_token_ids) for request in server.engine.requests}) == 1
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content[0].prompt_cache_breakpoint"
