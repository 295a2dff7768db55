"""Log-probabilities of prompts' own tokens, beside transformers' own logits: with `echo` and `logprobs`, asked for as
lm-evaluation-harness asks, and with vLLM's `prompt_logprobs`, which have ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ..eager_answers import EagerAnswers
from ..questions import LONG_QUESTION, MODEL, QUESTIONS, greedy
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 2e-3  # of float32 sums in another order
TOP = 5
TEXTS = (
    "The capital of France is Paris, and that of Germany is Berlin.",
    "Long waves, 長い波, длинные волны 🌊 (naïve café)\n\tend",
    LONG_QUESTION,
)


def scores(server: ServerProcess, prompt: Any, **more: Any) -> list[dict[str, Any]]:
    """The choices."""
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": TOP, "max_tokens": 0, "temperature": 0}
    reply = server.post("/v1/completions", body | more)
    assert reply.status_code == 200, reply.text
    return sorted(reply.json()["choices"], key=lambda choice: choice["index"])


def assert_right(choice: dict[str, Any], text: str, token_ids: list[int], eager: EagerAnswers) -> None:
    """Of a choice of the prompt alone."""
    found = choice["logprobs"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(token_ids)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    truth = eager.log_probabilities(token_ids)
    of_tokens = truth.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:]), of_tokens, atol=TOLERANCE, rtol=0)
    for top, best in zip(found["top_logprobs"][1:], truth.topk(TOP).values, strict=True):
        likeliest = torch.tensor(sorted(top.values(), reverse=True)[: len(top)])
        torch.testing.assert_close(likeliest[0], best[0], atol=TOLERANCE, rtol=0)
        assert 1 <= len(top) <= TOP + 1
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_alone(server: ServerProcess, eager: EagerAnswers, text: str) -> None:
    token_ids = eager.tokenizer.encode(text)

    (choice,) = scores(server, text)

    assert_right(choice, text, token_ids, eager)
    (of_ids,) = scores(server, token_ids)
    assert of_ids["logprobs"]["token_logprobs"][1:] == pytest.approx(
        choice["logprobs"]["token_logprobs"][1:], abs=TOLERANCE
    )


def test_a_prompt_whose_prefix_is_cached_is_scored_whole(server: ServerProcess, eager: EagerAnswers) -> None:
    text = LONG_QUESTION + " Which of them is the longest?"
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
    for _ in range(2):
        first = server.post("/v1/completions", body).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    (choice,) = scores(server, text)

    assert_right(choice, text, eager.tokenizer.encode(text), eager)
    again = server.post("/v1/completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_in_chunks(chunking_server: ServerProcess, eager: EagerAnswers, text: str) -> None:
    (choice,) = scores(chunking_server, text)

    assert_right(choice, text, eager.tokenizer.encode(text), eager)


def test_several_prompts_beside_answers_that_go_on(server: ServerProcess, eager: EagerAnswers) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(greedy, server, question, 16) for question in QUESTIONS[:4]]
        choices = scores(server, list(TEXTS))
        texts = [answer.result().choices[0].message.content for answer in answers]

    for choice, text in zip(choices, TEXTS, strict=True):
        assert_right(choice, text, eager.tokenizer.encode(text), eager)
    assert texts == [eager.chat(question, 16).text for question in QUESTIONS[:4]]


def test_preempted_prompts_are_scored_once(tight_server: ServerProcess, eager: EagerAnswers) -> None:
    texts = [f"{question} {question}" for question in QUESTIONS] * 2

    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda text: scores(tight_server, text, max_tokens=32)[0], texts))

    for choice, text in zip(found, texts, strict=True):
        token_ids = eager.tokenizer.encode(text)
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) > len(token_ids)
        of_tokens = eager.log_probabilities(token_ids).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs[1 : len(token_ids)]), of_tokens, atol=TOLERANCE, rtol=0)


def test_a_harness_counts_what_is_generated_from_the_end(server: ServerProcess, eager: EagerAnswers) -> None:
    """It asks for a token, and leaves out the last one that comes."""
    text = TEXTS[0]

    (whole,) = scores(server, text)
    (one,) = scores(server, text, max_tokens=1)

    assert one["text"].startswith(text)
    assert one["logprobs"]["token_logprobs"][1:-1] == pytest.approx(
        whole["logprobs"]["token_logprobs"][1:], abs=TOLERANCE
    )


def test_a_stream_says_the_same(server: ServerProcess) -> None:
    (whole,) = scores(server, LONG_QUESTION, max_tokens=4)
    with server.client() as client:
        chunks = list(
            client.completions.create(
                model=MODEL, prompt=LONG_QUESTION, echo=True, logprobs=TOP, max_tokens=4, temperature=0, stream=True
            )
        )

    texts = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    logprobs = [
        logprob
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs is not None
        for logprob in chunk.choices[0].logprobs.token_logprobs or ()
    ]
    assert texts == whole["text"]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=TOLERANCE)


def test_every_choice_of_a_cached_prompt_shows_its_scores(server: ServerProcess) -> None:
    """Those that are not scored are done first: their prompt is in the cache."""
    (alone,) = scores(server, LONG_QUESTION, max_tokens=4)

    choices = scores(server, LONG_QUESTION, max_tokens=4, n=3)

    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert choice["text"] == alone["text"]
        found, expected = choice["logprobs"], alone["logprobs"]
        assert (found["tokens"], found["text_offset"]) == (expected["tokens"], expected["text_offset"])
        assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=TOLERANCE)


def test_usage_of_a_prompt_alone(server: ServerProcess, eager: EagerAnswers) -> None:
    body = {"model": MODEL, "prompt": TEXTS[0], "echo": True, "logprobs": 1, "max_tokens": 0}

    usage = server.post("/v1/completions", body).json()["usage"]

    assert usage["prompt_tokens"] == len(eager.tokenizer.encode(TEXTS[0]))
    assert usage["completion_tokens"] == 0


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"logprobs": 1}])
def test_no_tokens_and_no_echo_is_nothing_to_ask_for(server: ServerProcess, fields: dict[str, Any]) -> None:
    reply = server.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 0, **fields})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "max_tokens"


def assert_ranked(found: list[dict[str, Any] | None], token_ids: list[int], eager: EagerAnswers, top: int) -> None:
    """Of vLLM's shape."""
    assert len(found) == len(token_ids)
    assert found[0] is None
    for own, entries, row in zip(token_ids[1:], found[1:], eager.log_probabilities(token_ids), strict=True):
        assert entries is not None
        assert top <= len(entries) <= top + 1
        ids = torch.tensor([int(token_id) for token_id in entries])
        logprobs = torch.tensor([entry["logprob"] for entry in entries.values()])
        torch.testing.assert_close(logprobs, row[ids], atol=TOLERANCE, rtol=0)
        for token_id, entry in entries.items():  # as exact as the logits are: others lie nearer than they are known
            likelier = int((row > row[int(token_id)] + TOLERANCE).sum())
            at_most = int((row > row[int(token_id)] - TOLERANCE).sum())  # itself included
            assert 1 + likelier <= entry["rank"] <= at_most
            assert "\ufffd" in entry["decoded_token"] or entry["decoded_token"] == eager.tokenizer.decode(int(token_id))
        assert str(own) in entries
        assert {entry["rank"] for entry in entries.values()} >= set(range(1, top + 1))


@pytest.mark.parametrize("text", TEXTS)
def test_ranks_of_a_prompt_s_tokens(server: ServerProcess, eager: EagerAnswers, text: str) -> None:
    body = {"model": MODEL, "prompt": [text, TEXTS[0]], "prompt_logprobs": TOP, "max_tokens": 2, "n": 2}

    reply = server.post("/v1/completions", body)

    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    for choice, prompt in zip(choices, (text, text, TEXTS[0], TEXTS[0]), strict=True):
        assert_ranked(choice["prompt_logprobs"], eager.tokenizer.encode(prompt), eager, TOP)


def test_ranks_of_a_prompt_in_chunks(chunking_server: ServerProcess, eager: EagerAnswers) -> None:
    body = {"model": MODEL, "prompt": LONG_QUESTION, "prompt_logprobs": 20, "max_tokens": 1}

    (choice,) = chunking_server.post("/v1/completions", body).json()["choices"]

    assert_ranked(choice["prompt_logprobs"], eager.tokenizer.encode(LONG_QUESTION), eager, 20)


def test_ranks_of_a_chat_s_prompt(server: ServerProcess, eager: EagerAnswers) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    token_ids = server.post("/tokenize", {"model": MODEL, "messages": messages}).json()["tokens"]
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
        )

    found = (answer.model_extra or {})["prompt_logprobs"]
    assert all(entries is None or len(entries) == 1 for entries in found)
    assert_ranked(found, token_ids, eager, 0)
