"""Replies that are not streamed are what pydantic writes, whatever they hold, and are written a little at a time."""

import asyncio
import gc
import json
import random
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import LiveServer, Script

from server.api import piecewise, sse
from server.api.reply_memory import ReplyMemory
from server.long_work import LongWork
from server.schemas import packed_json
from server.schemas.chat import AnswerMessage, ChatChoice, ChatCompletion, ChoiceLogprobs
from server.schemas.chat_reply import ChatReply
from server.schemas.completion_reply import CompletionReply
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs
from server.schemas.prompt_logprobs import PromptLogprobs, of_prompt
from server.schemas.usage import UsageInfo
from server.text.choice import TextDelta
from server.text.details import Candidate, TokenDetail
from server.text.generation import Usage

MODEL = 'a "model" of "logprobs":null'
USAGE = Usage(3, 4, 1)
NUM_TOP = 20

texts = st.text(max_size=8) | st.sampled_from(['"logprobs":null', '"prompt_logprobs":null', "[]", '\\"', "\u2028"])
candidates = st.builds(
    Candidate, st.integers(0, 9), texts, st.binary(max_size=4), st.floats(-100, 0), st.integers(1, 2**31 - 1)
)
details = st.builds(
    TokenDetail, candidates, st.lists(candidates, max_size=3).map(tuple), st.integers(0, 99), st.booleans()
)
deltas = st.lists(
    st.builds(
        TextDelta,
        st.integers(0, 1),
        texts,
        st.lists(details, max_size=3).map(tuple),
        prompt_details=st.lists(details, max_size=3).map(tuple),
    ),
    max_size=6,
).map(lambda parts: [*parts, TextDelta(0, "", (), "stop"), TextDelta(1, "!", (), "length")])


class Said:
    """A generation that is over already."""

    usage = USAGE

    def __init__(self, said: Iterator[TextDelta], num_choices: int = 2) -> None:
        self.requests = range(num_choices)
        self.echoes = [""] * num_choices
        self.long_work = LongWork()
        self._said = said

    async def next(self) -> TextDelta | None:
        return next(self._said, None)


async def collected(said: Iterator[TextDelta], reply: sse.Reply) -> bytes:
    with ReplyMemory().reply() as held:
        return b"".join(piecewise.parts(await sse._collect(Said(said), reply, held)))


def joined(parts: list[TextDelta], index: int) -> TextDelta:
    own = [part for part in parts if part.index == index]
    return replace(
        own[-1],
        text="".join(part.text for part in own),
        details=tuple(detail for part in own for detail in part.details),
        prompt_details=tuple(detail for part in own for detail in part.prompt_details),
    )


def prompt_logprobs(parts: list[TextDelta], index: int) -> PromptLogprobs | None:
    """None where nobody asked, so that none came."""
    return of_prompt(joined(parts, index).prompt_details) or None


def chat(parts: list[TextDelta], logprobs: bool) -> str:
    choices = [
        ChatChoice(
            index=index,
            message=AnswerMessage(content=choice.text),
            logprobs=ChoiceLogprobs.of(choice.details) if logprobs else None,
            finish_reason=choice.finish_reason,
        )
        for index, choice in enumerate((joined(parts, 0), joined(parts, 1)))
    ]
    scores, usage = prompt_logprobs(parts, 0), UsageInfo.of(USAGE)
    return ChatCompletion(
        id="id", created=7, model=MODEL, choices=choices, usage=usage, prompt_logprobs=scores
    ).model_dump_json()


def completion(parts: list[TextDelta], logprobs: bool, n: int) -> str:
    choices = [
        CompletionChoice(
            index=index,
            text=f"echo{index}{choice.text}",
            logprobs=CompletionLogprobs.of(choice.details) if logprobs else None,
            finish_reason=choice.finish_reason,
            prompt_logprobs=prompt_logprobs(parts, index if n == 1 else 0),
        )
        for index, choice in enumerate((joined(parts, 0), joined(parts, 1)))
    ]
    usage = UsageInfo.of(USAGE)
    return Completion(id="id", created=7, model=MODEL, choices=choices, usage=usage).model_dump_json()


@given(deltas, st.booleans(), st.sampled_from([1, 2]), st.sampled_from([1, 50, packed_json.PIECE_BYTES]))
def test_a_whole_reply_is_what_pydantic_writes(
    parts: list[TextDelta], logprobs: bool, n: int, packed_at_once: int
) -> None:
    reply = ChatReply("id", MODEL, 7, logprobs=logprobs, include_usage=False)
    other = CompletionReply("id", MODEL, 7, ["echo0", "echo1"], logprobs=logprobs, include_usage=False, n=n)
    with patch.object(packed_json, "PIECE_BYTES", packed_at_once):
        assert asyncio.run(collected(iter(parts), reply)).decode() == chat(parts, logprobs)
        assert asyncio.run(collected(iter(parts), other)).decode() == completion(parts, logprobs, n)


def detail(at: int) -> TokenDetail:
    top = tuple(
        Candidate(number, f" tok{number}", f" tok{number}".encode(), -1.0 - number, number + 1)
        for number in range(NUM_TOP)
    )
    return TokenDetail(Candidate(NUM_TOP, " the", b" the", -0.5, 1), top, 4 * at)


REPLIES = [
    ChatReply("id", MODEL, 7, logprobs=True, include_usage=False),
    CompletionReply("id", MODEL, 7, ["", ""], logprobs=True, include_usage=False),
    CompletionReply("id", MODEL, 7, ["", ""], logprobs=True, include_usage=False, n=2),
]


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("kind", ["details", "prompt_details"])
def test_others_have_their_turns_while_logprobs_are_written(reply: sse.Reply, kind: str) -> None:
    """Also where many tokens came as one: their reader was busy."""
    many = tuple(map(detail, range(1000)))
    parts = [TextDelta(0, "a", finish_reason="length", **{kind: many + many}), TextDelta(1, "b", (), "length")]

    async def turns() -> int:
        collecting = asyncio.create_task(collected(iter(parts), reply))
        number = 0
        while not collecting.done():
            await asyncio.sleep(0)
            number += 1
        return number

    assert asyncio.run(turns()) > 2 * 1000 / sse.LOGPROBS_AT_ONCE


def drawn(at: int, rng: random.Random) -> TokenDetail:
    """No two tokens have a log-probability in common, nor many a text."""

    def candidate() -> Candidate:
        (logprob,) = struct.unpack("f", struct.pack("f", -20 * rng.random()))  # as a device computes it
        token_id = rng.randrange(50_000)
        text = f" word{token_id}"
        return Candidate(token_id, text, text.encode(), logprob, rng.randrange(1, 100))

    return TokenDetail(candidate(), tuple(candidate() for _ in range(NUM_TOP)), 4 * at)


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("kind", ["details", "prompt_details"])
def test_logprobs_take_a_fraction_of_the_memory_of_their_json(reply: sse.Reply, kind: str) -> None:
    """A prompt's are in memory once, however many choices it has."""
    rng, count = random.Random(0), 600
    deltas = (
        TextDelta(index, "the ", finish_reason="length" if at == count - 1 else None, **said)
        for at in range(count)
        for index, said in enumerate(({kind: (drawn(at, rng),)}, {"details": (drawn(at, rng),)}))
    )

    async def sent() -> tuple[int, int, int]:
        with ReplyMemory().reply() as held:
            pieces = await sse._collect(Said(deltas), reply, held)
            gc.collect()  # Python keeps freed tuples, of what was drawn here, for the next ones
            assert abs(tracemalloc.get_traced_memory()[0] - held.num_held) < 200_000
            length = sum(map(len, pieces))
            assert length == sum(map(len, piecewise.parts(pieces)))
            return length, *tracemalloc.get_traced_memory()

    tracemalloc.start()
    try:
        length, left, most = asyncio.run(sent())
    finally:
        tracemalloc.stop()
    assert most - 2 * piecewise.PIECE_BYTES < 0.6 * length
    assert left < 0.1 * length  # what has been sent is gone


def test_a_long_reply_is_sent_in_pieces(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 1000)
    server.engine.script = Script(text=b"x" * 50)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    with server.client() as client:
        reply = client.post("/v1/chat/completions", json=body)
        assert client.get("/health/live").status_code == 200  # on the same connection
    assert int(reply.headers["content-length"]) == len(reply.content) > 40_000
    assert reply.headers["content-type"] == "application/json"
    (choice,) = json.loads(reply.content)["choices"]
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [20] * 50
