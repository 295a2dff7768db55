"""Deltas that were merged for a slow reader are spelled out and written a little at a time, and say the same."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import EOS, LiveServer, tiny_tokenizer
from token_logprobs import token_logprobs

from models.batch import SamplingParams, TokenLogprobs
from server.api import sse
from server.engine.messages import AddRequest, TokenDelta
from server.schemas.chat_reply import ChatReply
from server.schemas.completion_reply import CompletionReply
from server.text import pieces
from server.text.choice import ChoiceText, TextDelta
from server.text.details import TokenDetail
from server.text.generation import MAX_UNREAD_LOGPROBS, Job
from server.text.pieces import in_pieces
from server.text.tokenizer import TextTokenizer

TOKENS, TOP = 2904, 20
AT_ONCE = 16
WORDS = "hello wörld, 日本語 "


def merged(token_ids: list[int], top: int | None, **fields: Any) -> TokenDelta:
    def logprobs(token: int) -> TokenLogprobs:
        return token_logprobs(-0.5, [((token + other) % 256, -0.5 - other) for other in range(top or 0)])

    return TokenDelta("r", token_ids, None if top is None else [logprobs(token) for token in token_ids], **fields)


def text_of(count: int) -> list[int]:
    return list((WORDS * count).encode())[:count]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer())


Said = tuple[str, list[TokenDetail], str | None, int]


def spelled(tokenizer: TextTokenizer, deltas: Sequence[TokenDelta], stop: Sequence[str]) -> Said:
    choice = ChoiceText(tokenizer, 0, stop=stop)
    texts: list[TextDelta] = []
    for delta in deltas:
        texts.append(choice.feed(delta))
        if texts[-1].finish_reason is not None:
            break
    details = [detail for text in texts for detail in text.details]
    return "".join(text.text for text in texts), details, texts[-1].finish_reason, choice.num_tokens


@given(
    words=st.text(max_size=12),
    top=st.none() | st.integers(0, 4),
    end=st.sampled_from(["none", "length", "token", "string"]),
    most=st.integers(1, 12),
)
def test_pieces_say_what_the_delta_says(
    tokenizer: TextTokenizer, words: str, top: int | None, end: str, most: int
) -> None:
    ids = list(words.encode())
    match end:
        case "length":
            delta = merged(ids, top, finish_reason="length")
        case "token":
            delta = merged([*ids, EOS], top, finish_reason="stop", stop_token_id=EOS)
        case _:
            delta = merged(ids, top, num_cached_tokens=3)
    stop = [words[len(words) // 2 :][:3]] if end == "string" and words else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_LOGPROBS", most)
        patch.setattr(pieces, "MAX_TOKENS", most)
        parts = list(in_pieces(delta))
    assert [token for part in parts for token in part.token_ids] == delta.token_ids
    assert max(len(part.token_ids) for part in parts) <= max(1, most)
    assert {part.num_cached_tokens for part in parts} == {delta.num_cached_tokens}
    assert spelled(tokenizer, parts, stop) == spelled(tokenizer, [delta], stop)


def test_how_large_pieces_are() -> None:
    assert [len(part.token_ids) for part in in_pieces(merged(text_of(38), TOP))] == [16, 16, 6]
    assert [len(part.token_ids) for part in in_pieces(merged(text_of(600), 0))] == [336, 264]
    assert [len(part.token_ids) for part in in_pieces(merged(text_of(150), None))] == [64, 64, 22]
    small = merged(text_of(AT_ONCE), TOP, finish_reason="length")
    assert list(in_pieces(small)) == [small]


class Turns:
    """How often the event loop came round, and where it was when something took long."""

    def __init__(self) -> None:
        self.count = 0
        self.spelled: list[int] = []
        self.written: list[int] = []

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("late", [False, True], ids=["a reader that reads", "a reader that comes late"])
@pytest.mark.parametrize("chat", [True, False])
def test_the_event_loop_has_its_turns_between_pieces(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, late: bool, chat: bool
) -> None:
    door = server.lifecycle.generator
    assert door is not None
    whole = merged(text_of(TOKENS), TOP, finish_reason="length")

    async def generate(_request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        yield whole

    monkeypatch.setattr(server.engine, "generate", generate)
    turns = Turns()
    feed = ChoiceText.feed

    def counted(choice: ChoiceText, delta: TokenDelta) -> TextDelta:
        turns.spelled.append(turns.count)
        assert len(delta.token_ids) <= AT_ONCE
        return feed(choice, delta)

    monkeypatch.setattr(ChoiceText, "feed", counted)
    reply: Any = ChatReply("id", "m", 7, logprobs=True, include_usage=False)
    if not chat:
        reply = CompletionReply("id", "m", 7, [""], logprobs=True, include_usage=False)

    async def read() -> list[str]:
        counting = asyncio.create_task(turns.run())
        job = Job("job", ("hi",), SamplingParams(logprobs=TOP), max_tokens=1, arrival_time=time.monotonic())
        generation = await door.open(job)
        try:
            while late and generation._unread.empty():
                await asyncio.sleep(0)
            chunks: list[str] = []
            async with aclosing(sse._chunks(generation, reply, 60.0)) as written:
                async for chunk in written:
                    assert chunk is not None
                    if '"top_logprobs":[' in chunk:
                        turns.written.append(turns.count)
                    chunks.append(chunk)
            return chunks
        finally:
            counting.cancel()
            await generation.aclose()

    chunks = [json.loads(chunk)["choices"][0] for chunk in server.run(read())]
    expected = ChoiceText(door.tokenizer, 0)
    said = feed(expected, whole)
    assert "".join(chunk["delta"].get("content", "") if chat else chunk["text"] for chunk in chunks) == said.text
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "length"
    if chat:
        tokens = [entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    else:
        tokens = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["tokens"]]
    assert len(tokens) == TOKENS
    num_pieces = -(-TOKENS // AT_ONCE)
    for places in (turns.spelled, turns.written):
        assert len(places) == num_pieces
        assert all(before < after for before, after in itertools.pairwise(places))


def test_few_alternatives_are_spelled_out_for_a_reader_that_stalls(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits on the engine's side is packed."""
    door = server.lifecycle.generator
    assert door is not None
    token_ids = text_of(200)

    async def generate(_request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        for token in token_ids[:-1]:
            yield merged([token], TOP)
        yield merged(token_ids[-1:], TOP, finish_reason="length")

    monkeypatch.setattr(server.engine, "generate", generate)

    async def read() -> tuple[int, str]:
        job = Job("job", ("hi",), SamplingParams(logprobs=TOP), max_tokens=1, arrival_time=time.monotonic())
        async with aclosing(await door.open(job)) as generation:
            for _ in range(1000):  # turns of the loop
                await asyncio.sleep(0)
            waiting, text = generation._unread.qsize(), ""
            while (delta := await generation.next()) is not None:
                text += delta.text
            return waiting, text

    waiting, text = server.run(read())
    assert 1 <= waiting <= MAX_UNREAD_LOGPROBS // (1 + TOP) + 1
    assert text == bytes(token_ids).decode(errors="replace")
