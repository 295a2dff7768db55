"""The official client, unchanged, against a real socket."""

import itertools
import json
from collections.abc import Iterable, Iterator

import openai
import pytest
from scripted_engine import LIMIT, LiveServer, Script, live_server

from server.schemas.chat_reply import ChatReply
from server.text.choice import TextDelta
from server.text.generation import Usage


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_completion_has_text_finish_reason_and_usage(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(cached=3)
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion"
    prompt = server.engine.requests[0].prompt_token_ids
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len("hello world") + 1  # the end token is counted
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_begins_with_role_and_ends_with_finish_reason_and_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_max_tokens_ends_with_length(client: openai.OpenAI, server: LiveServer) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        reply = client.chat.completions.create(model="tiny", messages=MESSAGES, **{field: 5})
        assert reply.choices[0].message.content == "hello"
        assert reply.choices[0].finish_reason == "length"
    assert [request.sampling.max_tokens for request in server.engine.requests] == [5, 5]


def test_chat_without_max_tokens_may_fill_the_context(client: openai.OpenAI, server: LiveServer) -> None:
    client.chat.completions.create(model="tiny", messages=MESSAGES)
    request = server.engine.requests[0]
    assert request.sampling.max_tokens == 4096 - len(request.prompt_token_ids)


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(ends=False)
    reply = client.completions.create(model="tiny", prompt="hi")
    assert reply.choices[0].text == "hello world....."
    assert reply.choices[0].finish_reason == "length"
    assert server.engine.requests[0].sampling.max_tokens == 16


def test_completion_stream_joins_to_the_whole_text(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[104, 105]]),
        ([104, 105], [[104, 105]]),
        (["hi", "ho"], [[104, 105], [104, 111]]),
        ([[104, 105], [104]], [[104, 105], [104]]),
    ],
)
def test_prompts_may_be_texts_or_token_ids(
    client: openai.OpenAI, server: LiveServer, prompt: list[int], expected: list[list[int]]
) -> None:
    reply = client.completions.create(model="tiny", prompt=prompt)
    assert [list(request.prompt_token_ids) for request in server.engine.requests] == expected
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    assert reply.usage.prompt_tokens == sum(map(len, expected))


def test_echo_puts_the_prompt_in_front_whole_and_streamed(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="hi ", echo=True).choices[0].text == "hi hello world"
    chunks = list(client.completions.create(model="tiny", prompt="hi ", echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi hello world"


def test_n_choices_have_seeds_of_their_own_and_one_prompt_in_usage(client: openai.OpenAI, server: LiveServer) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=2**63 - 1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in server.engine.requests] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert reply.usage.prompt_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert reply.usage.completion_tokens == 3 * 12


def test_n_choices_are_merged_into_one_stream(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    ends = []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == ["hello world"] * 3
    assert sorted(ends) == [0, 1, 2]


def test_stop_string_ends_the_text_before_it_and_aborts_the_engine(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(ends=False)
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=["o w", "xyz"])
    assert reply.choices[0].message.content == "hell"
    assert reply.choices[0].finish_reason == "stop"
    assert server.engine.aborted == [server.engine.requests[0].request_id]


def test_chat_logprobs_have_openais_shape(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(text="é".encode())
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    first, second = reply.choices[0].logprobs.content
    assert first.bytes + second.bytes == list("é".encode())
    assert first.token == "\ufffd"
    assert first.logprob == -0.5
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5]
    chunks = list(
        client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=0, stream=True)
    )
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [first.bytes, second.bytes]
    assert streamed[0].top_logprobs == []


def test_completion_logprobs_have_openais_shape(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="tiny", prompt="hi", max_tokens=3, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "e", "l"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    chunks = list(client.completions.create(model="tiny", prompt="hi", max_tokens=3, logprobs=2, stream=True))
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == [0, 1, 2]


def test_offsets_of_logprobs_are_places_in_the_text(server: LiveServer, client: openai.OpenAI) -> None:
    server.engine.script = Script(text="é!?".encode())
    choice = client.completions.create(model="tiny", prompt="hi", max_tokens=4, logprobs=0).choices[0]
    assert choice.logprobs.tokens == ["\ufffd", "\ufffd", "!", "?"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2]


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 4096
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt/other")
    assert error.value.code == "model_not_found"


def test_errors_raise_the_right_classes(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    assert "maximum context length is 4096 tokens" in long.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function"}])
    assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "tools")
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert (hot.value.type, hot.value.param) == ("invalid_request_error", "temperature")
    assert server.engine.requests == []


@pytest.mark.parametrize("fail_after", range(12))
def test_failure_mid_stream_raises_wherever_it_happens(
    client: openai.OpenAI, server: LiveServer, fail_after: int
) -> None:
    server.engine.script = Script(fail_after=fail_after)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    chunks = []
    with pytest.raises(openai.APIError, match="engine stopped"):
        chunks.extend(stream)
    assert not any(chunk.choices[0].finish_reason for chunk in chunks)


def test_a_bug_of_ours_mid_stream_is_an_error_with_the_requests_id(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = ChatReply.chunks
    numbers = itertools.count()

    def chunks(reply: ChatReply, delta: TextDelta, usage: Usage | None) -> Iterable[str]:
        if next(numbers) == 3:
            raise KeyError("unforeseen")
        return told(reply, delta, usage)

    monkeypatch.setattr(ChatReply, "chunks", chunks)
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=MESSAGES, stream=True, extra_headers={"x-request-id": "mine"}
    ) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "server_error")
    assert error["message"] == f"The server failed. Request id: {response.headers['x-request-id']}"
    assert [record for record in caplog.records if record.exc_info and "in the midst of its answer" in record.message]


def test_failure_of_a_whole_reply_is_its_status(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(fail_after=3)
    with pytest.raises(openai.InternalServerError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert error.value.status_code == 503
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 10


def test_failure_of_one_choice_ends_the_others(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.script = Script(ends=False, fail_after=30)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=4)
    assert len(server.engine.aborted) == 4


def test_wrong_key_raises_authentication_error() -> None:
    with live_server(api_key="right") as server:
        for key in ("wrong", "righ", "right2"):
            with (
                openai.OpenAI(base_url=server.url + "/v1", api_key=key) as client,
                pytest.raises(openai.AuthenticationError) as error,
            ):
                client.models.list()
            assert error.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right") as client:
            assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices


def test_responses_the_client_sends_back_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message
    again = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, answer.model_dump(), {"role": "user", "content": "more"}], user="me"
    )
    assert again.choices[0].message.content == "hello world"
