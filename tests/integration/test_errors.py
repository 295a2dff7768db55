"""Failures reach the official client as its own exceptions, with OpenAI's codes."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .conftest import FLAGS, MAX_MODEL_LEN
from .questions import CAPITAL, MODEL
from .server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "sk-integration-0123456789"
MESSAGES = [{"role": "user", "content": CAPITAL}]


@pytest.fixture(scope="module")
def guarded_server(bundled_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, api_key=KEY) as process:
        yield process


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
def test_a_wrong_key(guarded_server: ServerProcess, key: str) -> None:
    with guarded_server.client(api_key=key) as client, pytest.raises(openai.AuthenticationError) as failure:
        client.models.list()

    assert failure.value.code == "invalid_api_key"


def test_the_right_key(guarded_server: ServerProcess) -> None:
    with guarded_server.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)

    assert answer.choices[0].message.role == "assistant"


def test_the_key_is_never_logged(guarded_server: ServerProcess) -> None:
    assert KEY not in guarded_server.log()
