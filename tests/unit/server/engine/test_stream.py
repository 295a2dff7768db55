"""One request's tokens between the engine's client and a reader of any speed."""

import asyncio
from typing import Any

import pytest
from token_logprobs import token_logprobs

from models.batch import PromptLogprobs
from server.engine.messages import TokenDelta
from server.engine.stream import MAX_BUFFERED, MAX_EVENTS, TokenStream
from server.errors import RequestFailedError


def delta(*token_ids: int, finish: Any = None) -> TokenDelta:
    return TokenDelta("a", list(token_ids), finish_reason=finish)


def test_a_slow_reader_gets_every_token_in_few_events() -> None:
    stream = TokenStream("a")
    for token in range(10_000):
        stream.put(delta(token))
    stream.put(delta(10_000, finish="stop"))
    assert stream.num_events == MAX_EVENTS

    async def read() -> list[TokenDelta]:
        return [await stream.get() for _ in range(MAX_EVENTS)]

    received = asyncio.run(read())
    assert [token for part in received for token in part.token_ids] == list(range(10_001))
    assert [part.finish_reason for part in received] == [None] * (MAX_EVENTS - 1) + ["stop"]


def test_tokens_that_come_behind_unread_scores_of_their_prompt_keep_their_log_probabilities() -> None:
    """Scores alone have no tokens, and so no log-probabilities of any."""
    stream = TokenStream("a")
    scores = PromptLogprobs(0, bytes(4), bytes(4), b"", b"")
    for _ in range(MAX_EVENTS):
        stream.put(TokenDelta("a", [], prompt_logprobs=[scores]))
    for token in range(3):
        stream.put(TokenDelta("a", [token], [token_logprobs(-token, [(token, -token)])]))

    async def read() -> list[TokenDelta]:
        return [await stream.get() for _ in range(MAX_EVENTS)]

    last = asyncio.run(read())[-1]
    assert last.token_ids == [0, 1, 2]
    assert [entry.logprob for entry in last.logprobs or ()] == [0, -1, -2]
    assert last.prompt_logprobs == [scores]
    assert stream._buffered == 0


def test_a_reader_that_does_not_read_at_all_is_cut() -> None:
    stream = TokenStream("a")
    for token in range(MAX_BUFFERED + 1):
        stream.put(delta(token))
    assert stream.num_events == 0
    with pytest.raises(RequestFailedError):
        asyncio.run(stream.get())
