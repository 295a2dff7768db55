"""Chunks from templates are the chunks that pydantic writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.chat import ChatChunkChoice, ChatCompletionChunk, ChatDelta
from server.schemas.chat_reply import ChatReply
from server.schemas.completion_reply import CompletionReply
from server.schemas.completions import CompletionChunk, CompletionChunkChoice
from server.text.choice import TextDelta

MODEL = 'a "model" \\ of ours\u2028'
EVERY_CHARACTER = "".join(chr(code) for code in range(1, 0x11000) if not 0xD800 <= code < 0xE000)


def completion(text: str, index: int, usage: bool) -> str:
    choice = CompletionChunkChoice(index=index, text=text)
    chunk = CompletionChunk(id="cmpl-1", created=7, model=MODEL, choices=[choice])
    return chunk.model_dump_json(exclude=None if usage else {"usage"})


def chat(text: str, index: int, usage: bool) -> str:
    choice = ChatChunkChoice(index=index, delta=ChatDelta(content=text))
    chunk = ChatCompletionChunk(id="cmpl-1", created=7, model=MODEL, choices=[choice])
    return chunk.model_dump_json(exclude=None if usage else {"usage"})


def check(text: str, usage: bool) -> None:
    replies = (
        (CompletionReply("cmpl-1", MODEL, 7, ["", ""], logprobs=False, include_usage=usage), completion),
        (ChatReply("cmpl-1", MODEL, 7, logprobs=False, include_usage=usage), chat),
    )
    for reply, write in replies:
        for index in (1, 0, 1):
            assert list(reply.chunks(TextDelta(index, text))) == [write(text, index, usage)]


@given(st.text(min_size=1), st.booleans())
def test_a_chunk_of_text_is_what_pydantic_writes(text: str, usage: bool) -> None:
    check(text, usage)


@pytest.mark.parametrize("usage", [True, False])
def test_every_character_is_written_as_pydantic_does(usage: bool) -> None:
    check(EVERY_CHARACTER + "\U0001f600", usage)
