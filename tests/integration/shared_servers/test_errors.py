"""Failures reach the official client as its own exceptions, with OpenAI's codes."""

import httpx
import openai
import pytest

from ..conftest import MAX_MODEL_LEN
from ..questions import CAPITAL, MODEL
from ..server_process import ServerProcess, wait_until
from .conftest import KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": CAPITAL}]


def test_a_prompt_that_cannot_fit(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "long wave " * MAX_MODEL_LEN}]

    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model=MODEL, messages=messages)

    assert failure.value.code == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in failure.value.message


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        client.chat.completions.create(model="gpt-none", messages=MESSAGES)

    assert failure.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 3), ("n", 0), ("top_p", 2), ("max_tokens", 0), ("top_logprobs", 21), ("stop", ["a"] * 33)],
)
def test_a_field_out_of_bounds_is_400_and_named(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, **{field: value})

    assert failure.value.type == "invalid_request_error"
    assert failure.value.param == field


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], KEY + "0"])
def test_a_wrong_key(chunking_server: ServerProcess, key: str) -> None:
    with chunking_server.client(api_key=key) as client, pytest.raises(openai.AuthenticationError) as failure:
        client.models.list()

    assert failure.value.code == "invalid_api_key"


def test_the_right_key(chunking_server: ServerProcess) -> None:
    with chunking_server.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)

    assert answer.choices[0].message.role == "assistant"


def test_keys_are_in_no_log_and_in_no_answer(chunking_server: ServerProcess) -> None:
    wrong = "sk-wrong-9876543210"
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    asked: list[tuple[str, str, object, int]] = [
        ("POST", "/v1/chat/completions", chat, 200),
        ("POST", "/v1/chat/completions", {**chat, "n": 0}, 400),
        ("GET", "/v1/models/gpt-none", None, 404),
        ("GET", "/v1/nowhere", None, 404),
    ]
    logged = []
    for key in (KEY, wrong):
        for at, (method, path, body, expected) in enumerate(asked):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"{'right' if key == KEY else 'wrong'}-{at}"}
            reply = httpx.request(method, chunking_server.url + path, json=body, headers=headers, timeout=120)
            assert reply.status_code == (expected if key == KEY else 401)
            answer = f"{reply.headers}{reply.text}"
            assert KEY not in answer
            assert wrong not in answer
            logged.append(headers["x-request-id"])
    wait_until(lambda: all(name in chunking_server.log() for name in logged), "the requests are in the log")
    assert KEY not in chunking_server.log()
    assert wrong not in chunking_server.log()
