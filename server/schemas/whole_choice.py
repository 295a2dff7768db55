"""A choice of a reply that goes out whole, gathered as it comes. Its logprobs, and its prompt's, are JSON at once, and
packed: as objects they would take many times the memory, and writing all of them together seconds of the event loop.
Knows no endpoint."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from typing import Any

from pydantic_core import to_json

from server.schemas.packed_json import PackedJSON
from server.schemas.prompt_logprobs import of_prompt
from server.schemas.wire import WireModel
from server.text.choice import TextDelta, TextFinish
from server.text.details import TokenDetail

NONE = b"null"
NO_LOGPROBS = re.compile(rb'("(?:prompt_)?logprobs":)null')  # in a string the quotation marks would not stand alone

Logprobs = Iterable[bytes | PackedJSON]  # as JSON, in pieces


class WholeChoice:
    def __init__(self, index: int, logprobs_of: Callable[[tuple[TokenDetail, ...]], WireModel] | None) -> None:
        """`logprobs_of`: tokens as the endpoint writes them, in lists that grow with the answer; None: nobody asked."""
        self.index = index
        self.finish_reason: TextFinish | None = None
        self._text = StringIO()
        self._logprobs = None if logprobs_of is None else _Logprobs(logprobs_of)
        self._of_prompt = PackedJSON()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def num_characters(self) -> int:
        return self._text.tell()

    @property
    def num_held(self) -> int:
        """Bytes of memory that its logprobs take, and its prompt's."""
        return self._of_prompt.num_held + (0 if self._logprobs is None else self._logprobs.num_held)

    def add_text(self, delta: TextDelta) -> None:
        self._text.write(delta.text)
        self.finish_reason = delta.finish_reason

    def add_logprobs(self, details: tuple[TokenDetail, ...]) -> None:
        if self._logprobs is not None:
            self._logprobs.add(details)

    def add_prompt_logprobs(self, details: tuple[TokenDetail, ...]) -> None:
        _append(self._of_prompt, of_prompt(details))

    def logprobs(self) -> Logprobs:
        return (NONE,) if self._logprobs is None else self._logprobs.pieces()

    def prompt_logprobs(self) -> Logprobs:
        """Any number of times: choices of one prompt say the same."""
        return (b"[", self._of_prompt.copy(), b"]") if self._of_prompt else (NONE,)


class _Logprobs:
    def __init__(self, write: Callable[[tuple[TokenDetail, ...]], WireModel]) -> None:
        self._write = write
        empty = write(())
        self._empty = empty.model_dump_json().encode()
        self._lists = {name: PackedJSON() for name, value in empty if isinstance(value, list)}

    @property
    def num_held(self) -> int:
        return sum(items.num_held for items in self._lists.values())

    def add(self, details: tuple[TokenDetail, ...]) -> None:
        written = self._write(details)
        for name, items in self._lists.items():
            _append(items, getattr(written, name))

    def pieces(self) -> Iterator[bytes | PackedJSON]:
        first, *others = self._empty.split(b"[]")
        yield first
        for items, after in zip(self._lists.values(), others, strict=True):
            yield b"["
            yield items
            yield b"]" + after


def _append(items: PackedJSON, more: Sequence[Any]) -> None:
    """To the inside of a list."""
    items.write((b"," if items else b"") + to_json(more)[1:-1])


def with_logprobs(document: str, logprobs: Iterable[Logprobs]) -> Iterator[bytes | PackedJSON]:
    """The reply in pieces: `document`, which has null in all places of log-probabilities, and what stands there."""
    first, *others = NO_LOGPROBS.split(document.encode())
    yield first
    for name, pieces, after in zip(others[::2], logprobs, others[1::2], strict=True):
        yield name
        yield from pieces
        yield after
