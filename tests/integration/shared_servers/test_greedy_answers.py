"""A greedy answer is transformers' own, token for token, however the engine came to it."""

import pytest
from openai.types.chat import ChatCompletion

from ..eager_answers import Answer, EagerAnswers
from ..questions import CAPITAL, LONG_QUESTION, QUESTIONS, greedy, greedy_at_once
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 24


def assert_equal(completion: ChatCompletion, expected: Answer) -> None:
    choice, usage = completion.choices[0], completion.usage
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert usage is not None
    assert usage.prompt_tokens == expected.num_prompt_tokens
    assert usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("question", [*QUESTIONS, LONG_QUESTION])
def test_alone(server: ServerProcess, eager: EagerAnswers, question: str) -> None:
    assert_equal(greedy(server, question, MAX_TOKENS), eager.chat(question, MAX_TOKENS))


def test_among_32_concurrent_requests(server: ServerProcess, eager: EagerAnswers) -> None:
    questions = [QUESTIONS[index % len(QUESTIONS)] for index in range(32)]

    completions = greedy_at_once(server, questions, MAX_TOKENS)

    for question, completion in zip(questions, completions, strict=True):
        assert_equal(completion, eager.chat(question, MAX_TOKENS))


def test_with_a_prefix_hit(server: ServerProcess, eager: EagerAnswers) -> None:
    expected = eager.chat(LONG_QUESTION, MAX_TOKENS)
    greedy(server, LONG_QUESTION, MAX_TOKENS)

    again = greedy(server, LONG_QUESTION, MAX_TOKENS)

    assert_equal(again, expected)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 < cached < expected.num_prompt_tokens


@pytest.mark.parametrize("question", [CAPITAL, LONG_QUESTION])
def test_in_chunks(chunking_server: ServerProcess, eager: EagerAnswers, question: str) -> None:
    assert_equal(greedy(chunking_server, question, MAX_TOKENS), eager.chat(question, MAX_TOKENS))


def test_in_chunks_mixed_with_others_decode_rows(chunking_server: ServerProcess, eager: EagerAnswers) -> None:
    questions = [LONG_QUESTION, *QUESTIONS] * 2

    completions = greedy_at_once(chunking_server, questions, MAX_TOKENS)

    for question, completion in zip(questions, completions, strict=True):
        assert_equal(completion, eager.chat(question, MAX_TOKENS))


def test_with_forced_preemption(tight_server: ServerProcess, eager: EagerAnswers) -> None:
    questions = [*QUESTIONS] * 4
    long_enough = 64  # tokens: the pool holds four such requests

    completions = greedy_at_once(tight_server, questions, long_enough)

    assert tight_server.metrics()["longwave:num_preemptions_total"] > 0
    for question, completion in zip(questions, completions, strict=True):
        assert_equal(completion, eager.chat(question, long_enough))
    tight_server.wait_until_idle()
