"""Failures reach the official client as its own exceptions, with OpenAI's codes."""

import openai
import pytest

from .conftest import KEY, MAX_MODEL_LEN
from .questions import CAPITAL, MODEL
from .server_process import ServerProcess

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
    [("temperature", 3), ("n", 0), ("top_p", 2), ("max_tokens", 0), ("top_logprobs", 21), ("stop", ["a"] * 5)],
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


def test_the_key_is_never_logged(chunking_server: ServerProcess) -> None:
    assert KEY not in chunking_server.log()
