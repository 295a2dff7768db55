"""Chunks from templates are the chunks that pydantic writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.chat import ChatChunkChoice, ChatCompletionChunk, ChatDelta
from server.schemas.chat_reply import ChatReply
from server.schemas.completion_reply import CompletionReply
from server.schemas.completions import CompletionChunk, CompletionChunkChoice
from server.schemas.usage import IncludeUsage, UsageInfo
from server.text.choice import TextDelta
from server.text.generation import Usage

MODEL = 'a "model" \\ of ours\u2028'
USAGES: tuple[IncludeUsage, ...] = (False, True, "continuous")
EVERY_CHARACTER = "".join(chr(code) for code in range(1, 0x11000) if not 0xD800 <= code < 0xE000)


def completion(text: str, index: int, include_usage: IncludeUsage, usage: Usage | None) -> str:
    choice, told = CompletionChunkChoice(index=index, text=text), usage and UsageInfo.of(usage)
    chunk = CompletionChunk(id="cmpl-1", created=7, model=MODEL, choices=[choice], usage=told)
    return chunk.model_dump_json(exclude=None if include_usage else {"usage"})


def chat(text: str, index: int, include_usage: IncludeUsage, usage: Usage | None) -> str:
    choice, told = ChatChunkChoice(index=index, delta=ChatDelta(content=text)), usage and UsageInfo.of(usage)
    chunk = ChatCompletionChunk(id="cmpl-1", created=7, model=MODEL, choices=[choice], usage=told)
    return chunk.model_dump_json(exclude=None if include_usage else {"usage"})


def check(text: str, include_usage: IncludeUsage) -> None:
    replies = (
        (CompletionReply("cmpl-1", MODEL, 7, ["", ""], logprobs=False, include_usage=include_usage), completion),
        (ChatReply("cmpl-1", MODEL, 7, logprobs=False, include_usage=include_usage), chat),
    )
    for reply, write in replies:
        for index in (1, 0, 1):
            usage = Usage(30, 4 + index, 2) if include_usage == "continuous" else None
            assert list(reply.chunks(TextDelta(index, text), usage)) == [write(text, index, include_usage, usage)]


@given(st.text(min_size=1) | st.just('null, "usage":null'), st.sampled_from(USAGES))
def test_a_chunk_of_text_is_what_pydantic_writes(text: str, include_usage: IncludeUsage) -> None:
    check(text, include_usage)


@pytest.mark.parametrize("include_usage", USAGES)
def test_every_character_is_written_as_pydantic_does(include_usage: IncludeUsage) -> None:
    check(EVERY_CHARACTER + "\U0001f600", include_usage)
