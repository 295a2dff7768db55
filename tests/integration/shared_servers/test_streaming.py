"""A stream says what the whole answer says, chunk by chunk, and closes as OpenAI's does."""

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from ..eager_answers import EagerAnswers
from ..questions import CAPITAL, MODEL
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_TOKENS = 24
MESSAGES = [{"role": "user", "content": CAPITAL}]


def stream(client: openai.OpenAI, **options: object) -> list[ChatCompletionChunk]:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, **options}
    with client.chat.completions.create(**request, stream=True) as chunks:
        return list(chunks)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(deltas)


def test_chat_deltas_join_to_the_answer(client: openai.OpenAI, eager: EagerAnswers) -> None:
    expected = eager.chat(CAPITAL, MAX_TOKENS)

    chunks = stream(client)

    assert text_of(chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [expected.finish_reason]


def test_usage_comes_once_and_last(client: openai.OpenAI, eager: EagerAnswers) -> None:
    expected = eager.chat(CAPITAL, MAX_TOKENS)

    chunks = stream(client, stream_options={"include_usage": True})

    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1].usage
    assert usage is not None
    assert chunks[-1].choices == []
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, len(expected.token_ids))


def test_completions_stream_and_whole_are_equal(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**request)

    with client.completions.create(**request, stream=True) as chunks:
        joined = "".join(choice.text for chunk in chunks for choice in chunk.choices)

    assert joined == whole.choices[0].text
    assert joined


def test_a_stop_string_ends_both_at_the_same_place(client: openai.OpenAI, eager: EagerAnswers) -> None:
    text = eager.chat(CAPITAL, MAX_TOKENS).text
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 3]  # in the middle of words, so in several tokens
    before = text[: text.index(stop)]

    chunks = stream(client, stop=[stop])
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0, stop=[stop]
    )

    assert text_of(chunks) == before
    assert whole.choices[0].message.content == before
    assert whole.choices[0].finish_reason == "stop"


def test_the_body_is_server_sent_events_ending_in_done(server: ServerProcess) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}

    reply = server.post("/v1/chat/completions", body)

    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line for line in reply.text.split("\n\n") if line]
    assert all(event.startswith(("data: ", ":")) for event in events)
    assert events[-1] == "data: [DONE]"
