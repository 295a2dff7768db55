"""Hostile and wrong bodies: 400 in OpenAI's shape, naming the field, and no engine ever sees them."""

import json
from typing import Any

import pytest
from scripted_engine import VOCAB_SIZE, LiveServer

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
HUGE = {"2^31": 2**31, "2^63": 2**63, "10^100": 10**100, "-2^63-1": -(2**63) - 1, "1e400": "RAW:1e400",
        "NaN": "RAW:NaN",
        "Infinity": "RAW:Infinity", "string": "1", "true": True, "list": [1], "object": {}}  # fmt: skip

# field -> (least, most) allowed, and whether it counts
BOUNDS: dict[str, tuple[float, float, bool]] = {
    "n": (1, 8, True),
    "max_tokens": (1, 16_777_216, True),
    "min_tokens": (0, 16_777_216, True),
    "temperature": (0, 2, False),
    "top_p": (0, 1, False),
    "top_k": (-1, 1_000_000, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0.01, 2, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
}
CHAT_BOUNDS = BOUNDS | {"max_completion_tokens": (1, 16_777_216, True), "top_logprobs": (0, 20, True)}
TEXT_BOUNDS = BOUNDS | {"logprobs": (0, 5, True)}
SEED = {"2^63": 2**63, "10^100": 10**100, "1.5": 1.5, "string": "1", "true": True}


def hostile(bounds: dict[str, tuple[float, float, bool]]) -> list[Any]:
    cases = []
    for field, (least, most, counts) in bounds.items():
        values = HUGE | {"below": least - 1, "above": most + 1} | ({"1.5": 1.5} if counts else {})
        cases += [pytest.param(field, value, id=f"{field}={name}") for name, value in values.items()]
    return cases + [pytest.param("seed", value, id=f"seed={name}") for name, value in SEED.items()]


def refused(server: LiveServer, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    for literal in (b"1e400", b"NaN", b"Infinity"):
        raw = raw.replace(b'"RAW:' + literal + b'"', literal)
    with server.client() as client:
        reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert server.engine.requests == []
    return error


@pytest.mark.parametrize(("field", "value"), hostile(CHAT_BOUNDS))
def test_hostile_numbers_in_chat_are_400(server: LiveServer, field: str, value: Any) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, field: value})
    assert error["param"] in (field, None, "messages")


@pytest.mark.parametrize(("field", "value"), hostile(TEXT_BOUNDS))
def test_hostile_numbers_in_completions_are_400(server: LiveServer, field: str, value: Any) -> None:
    refused(server, "/v1/completions", {**TEXT, field: value})


@pytest.mark.parametrize("value", [0, 1e-300, 1e-40, 0.009])
def test_a_repetition_penalty_that_makes_logits_infinite_is_400(server: LiveServer, value: float) -> None:
    assert refused(server, "/v1/completions", {**TEXT, "repetition_penalty": value})["param"] == "repetition_penalty"


@pytest.mark.parametrize("field", [*CHAT_BOUNDS, "seed", "stop", "logit_bias", "stream", "logprobs", "stop_token_ids"])
def test_null_means_default(server: LiveServer, field: str) -> None:
    with server.client() as client:
        assert client.post("/v1/chat/completions", json={**CHAT, field: None}).status_code == 200
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_every_sampling_field_reaches_the_engine(server: LiveServer) -> None:
    body = {
        **CHAT, "max_tokens": 7, "min_tokens": 2, "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -2, "logit_bias": {"5": -100},
        "seed": 3, "stop_token_ids": [9], "ignore_eos": True, "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    got = server.engine.requests[0].sampling
    assert (got.max_tokens, got.min_tokens, got.temperature, got.top_k, got.top_p, got.min_p) == (
        7,
        2,
        0.0,
        0,
        0.5,
        0.1,
    )
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.1, 1.0, -2.0)
    assert (got.logit_bias, got.seed, got.stop_token_ids, got.ignore_eos, got.logprobs) == (
        {5: -100.0},
        3,
        (9,),
        True,
        4,
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "color": "red"}]}, "messages[0].color"),
        ({"messages": [{"role": "user", "content": "x", "name": "no spaces"}]}, "messages[0].name"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperatur": 1}, "temperatur"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
    ],
)
def test_wrong_fields_are_named(server: LiveServer, change: dict[str, Any], param: str | None) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, **change})
    assert str(error["param"]).startswith(str(param)), error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_wrong_completion_fields_are_named(server: LiveServer, change: dict[str, Any], param: str | None) -> None:
    error = refused(server, "/v1/completions", {**TEXT, **change})
    assert str(error["param"]).startswith(str(param)), error


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": ["a"] * 33}, "Invalid value for 'stop': List should have at most 32 items, not 33."),
        ({"prompt": []}, "Invalid value for 'prompt': List should have at least 1 item, not 0."),
        ({"prompt": ["a", 1]}, "Invalid value for 'prompt[1]': Input should be a valid string."),
        ({"prompt": [1, "a"]}, "Invalid value for 'prompt[1]': Input should be a valid integer."),
        ({"prompt": [[1], "a"]}, "Invalid value for 'prompt[1]': Input should be a valid list."),
        ({"prompt": ["a"] * 129}, "Invalid value for 'prompt': List should have at most 128 items, not 129."),
        (b"[]", "The request body must be a JSON object."),
    ],
)
def test_the_complaint_is_about_what_was_meant(server: LiveServer, body: dict[str, Any] | bytes, said: str) -> None:
    """A list that is too long is no "valid string" either, which would help nobody."""
    assert refused(server, "/v1/completions", body if isinstance(body, bytes) else {**TEXT, **body})["message"] == said


UNSUPPORTED = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}), ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"), ("prediction", {}), ("web_search_options", {}), ("functions", [{}]),
    ("chat_template", "{{ 1 }}"), ("cache_salt", "x"), ("guided_regex", "a+"),
    ("continue_final_message", True), ("return_token_ids", True), ("length_penalty", True),
    ("moderation", {"model": "omni-moderation-latest"}), ("thinking_token_budget", 5), ("watermarking", True),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=[field for field, _ in UNSUPPORTED])
def test_what_is_not_served_is_refused_by_name(server: LiveServer, field: str, value: Any) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, field: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [*CHAT["messages"], {"role": "assistant", "audio": {}}]}, "messages[1].audio"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}], "n": 0}, "messages[0].audio"),
    ],
)
def test_what_is_not_served_is_named_where_it_stands(server: LiveServer, change: dict[str, Any], param: str) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, **change})
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert error["message"] == f"Unsupported parameter: '{param}' is not served here."


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("tool_choice", "required", ', except as "none" or "auto"'),
        ("response_format", {"type": "json_object"}, ', except as {"type": "text"}'),
        ("reasoning_effort", "high", ', except as "none"'),
        ("skip_special_tokens", False, ", except as true"),
        ("continue_final_message", True, ", except as false"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], ""),
    ],
)
def test_what_is_served_of_it_is_said(server: LiveServer, field: str, value: Any, accepted: str) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, field: value})
    assert error["message"] == f"Unsupported parameter: '{field}' is not served here{accepted}."


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"messages": []}, "'messages' is set by the server itself"),
        ({"tools": []}, "'tools' is set by the server itself"),
        ({"eos_token": "x"}, "'eos_token' is set by the server itself"),
        ({"a": "x" * 16_384}, "they have more than 16384 characters and values"),
        ({"a": [10**4000] * 5}, "they have more than 16384 characters and values"),
        ({"a": [[[[[[[[1]]]]]]]]}, "they are nested more than 8 deep"),
        ({"a": list(range(30_000))}, "they have a list of thousands of numbers"),
        ({f"v{at}": 1 for at in range(65)}, "Dictionary should have at most 64 items"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_variables_of_the_template_have_bounds(
    server: LiveServer, path: str, variables: dict[str, Any], said: str
) -> None:
    error = refused(server, path, {**CHAT, "chat_template_kwargs": variables} if path != "/tokenize" else
                    {"messages": CHAT["messages"], "chat_template_kwargs": variables})  # fmt: skip
    assert (error["param"], error["code"]) == ("chat_template_kwargs", None)
    assert said in error["message"]


def test_a_prompt_has_no_variables_of_a_template(server: LiveServer) -> None:
    error = refused(server, "/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}})
    assert error["param"] == "chat_template_kwargs"


def test_images_are_refused_by_name(server: LiveServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    error = refused(server, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [part]}]})
    assert error["code"] == "unsupported_parameter"


def test_asking_for_what_happens_anyway_is_fine(server: LiveServer) -> None:
    body = {
        **CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True,
        "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_another_servers_answer_goes_on_here(server: LiveServer) -> None:
    """vLLM's message as its clients keep it: with null for what it has not."""
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"))
    answered = {"role": "assistant", "content": "Hi.", "tool_calls": [], **nothing}
    with server.client() as client:
        body = {**CHAT, "messages": [*CHAT["messages"], answered, *CHAT["messages"]]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_more_stop_strings_than_openais_four_are_taken(server: LiveServer) -> None:
    """lm-evaluation-harness sends all of a task's: HumanEval has eight."""
    stops = ["\nclass", "\n#", "\nif", "\nprint", "\n```", "\n```\n\n", "<|eot_id|>", "</s>", "<eos>"]
    with server.client() as client:
        assert client.post("/v1/completions", json={**TEXT, "stop": stops}).status_code == 200


def test_text_parts_join(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with server.client() as client:
        for content in (parts, "a\nb"):
            client.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "developer", "content": content}]})
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


BOMBS = {
    "depth": b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "digits": b'{"model":"tiny","messages":[],"n":' + b"9" * 1_000_000 + b"}",
    "keys": b"{" + b",".join(b'"%d":1' % at for at in range(90_000)) + b"}",
    "twice": b'{"model":"tiny","model":"tiny","messages":[{"role":"user","content":"x"}]}',
    "surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "not utf-8": b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
    "utf-16": '{"model":"tiny"}'.encode("utf-16"),
    "empty": b"",
    "number": b"5",
    "null": b"null",
    "array": b"[]",
    "cut": b'{"model":',
    "many errors": b'{"model":"tiny","messages":[' + b",".join([b"1"] * 10_000) + b"]}",
    "many stop tokens": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stop_token_ids":['
    + b",".join([b'"x"'] * 10_000) + b"]}",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_json_bombs_are_400(server: LiveServer, bomb: str) -> None:
    error = refused(server, "/v1/chat/completions", BOMBS[bomb])
    assert len(error["message"]) < 1000


def test_many_choices_are_capped_by_the_setting(server: LiveServer) -> None:
    assert refused(server, "/v1/chat/completions", {**CHAT, "n": 9})["param"] == "n"
    assert refused(server, "/v1/chat/completions", {**CHAT, "n": 128})["param"] == "n"


def test_errors_do_not_repeat_what_was_sent(server: LiveServer) -> None:
    secret = "canary-7f3a"
    for change in ({"messages": [{"role": secret, "content": secret}]}, {"temperature": secret}, {"stop": {secret: 1}}):
        assert secret not in json.dumps(refused(server, "/v1/chat/completions", {**CHAT, **change}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, VOCAB_SIZE, 2]}, "prompt"),
        ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt"),
        ({"prompt": "hi", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt": "hi", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ],
)
def test_tokens_that_the_model_lacks_are_400_and_never_reach_the_engine(
    server: LiveServer, fields: dict[str, object], param: str
) -> None:
    with server.client() as client:
        reply = client.post("/v1/completions", json={"model": "tiny", "max_tokens": 1, **fields})
        known = client.post("/v1/completions", json={"model": "tiny", "max_tokens": 1, "prompt": [0, VOCAB_SIZE - 1]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert known.status_code == 200
    assert [list(request.prompt_token_ids) for request in server.engine.requests] == [[0, VOCAB_SIZE - 1]]
