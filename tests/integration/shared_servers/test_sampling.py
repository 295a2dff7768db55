"""Sampling options through the official client."""

import openai
import pytest

from ..eager_answers import EagerAnswers
from ..questions import CAPITAL, MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": CAPITAL}]


def ask(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 16, **options})


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, eager: EagerAnswers) -> None:
    expected = eager.chat(CAPITAL, 24)

    completion = ask(client, temperature=0, max_tokens=24, logprobs=True, top_logprobs=5)

    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    content = logprobs.content
    # The token that ends an answer may be left out: it is no text.
    assert len(expected.token_ids) - len(content) in (0, 1)
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs[: len(content)], abs=1e-3)
    for entry in content:
        top = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert entry.logprob == top[0]


def test_n_greedy_choices_are_one_answer(client: openai.OpenAI, eager: EagerAnswers) -> None:
    completion = ask(client, temperature=0, n=2)

    first, second = completion.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content == second.message.content
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2 * len(eager.chat(CAPITAL, 16).token_ids)


def test_a_seed_repeats_the_answers_and_its_choices_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        messages = [{"role": "user", "content": "Invent a name for a sailing ship and describe her."}]
        completion = ask(client, messages=messages, temperature=1.5, seed=seed, n=2)
        return [choice.message.content for choice in completion.choices]

    assert texts(7) == texts(7)
    assert len({*texts(7), *texts(70)}) == 4  # a choice's seed is the request's plus its index, as vLLM's is


def test_logit_bias_forces_and_forbids_tokens(client: openai.OpenAI, eager: EagerAnswers) -> None:
    token = eager.tokenizer.encode(" Paris", add_special_tokens=False)[0]

    forced = ask(client, temperature=0, max_tokens=3, logit_bias={str(token): 100})
    forbidden = ask(client, temperature=0, logit_bias={str(token): -100})

    assert forced.choices[0].message.content == " Paris" * 3
    assert " Paris" not in (forbidden.choices[0].message.content or "")


def test_max_tokens_is_kept(client: openai.OpenAI) -> None:
    completion = ask(client, max_tokens=1)

    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 1
