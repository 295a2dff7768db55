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
    ("store", "yes", "store"),
    ("service_tier", 1, "service_tier"),
    ("safety_identifier", [], "safety_identifier"),
    ("prompt_cache_key", "k" * 513, "prompt_cache_key"),
    ("prompt_cache_retention", 24, "prompt_cache_retention"),
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
