"""A choice of a reply that goes out whole, gathered as it comes. Its logprobs are JSON at once, and packed: as objects
they would take many times the memory, and writing all of them together seconds of the event loop. Knows no endpoint."""

from collections.abc import Callable, Iterator, Sequence
from io import StringIO

from pydantic_core import to_json

from server.schemas.packed_json import PackedJSON
from server.schemas.wire import WireModel
from server.text.choice import TextDelta, TextFinish
from server.text.details import TokenDetail

LOGPROBS = b'"logprobs":'
NO_LOGPROBS = LOGPROBS + b"null"  # within a string the quotation marks would not stand alone


class WholeChoice:
    def __init__(self, index: int, logprobs_of: Callable[[tuple[TokenDetail, ...]], WireModel] | None) -> None:
        """`logprobs_of`: tokens as the endpoint writes them, in lists that grow with the answer; None: nobody asked."""
        self.index = index
        self.finish_reason: TextFinish | None = None
        self._text = StringIO()
        self._logprobs = None if logprobs_of is None else _Logprobs(logprobs_of)

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def num_held(self) -> int:
        """Bytes of memory that its logprobs take."""
        return 0 if self._logprobs is None else self._logprobs.num_held

    def add_text(self, delta: TextDelta) -> None:
        self._text.write(delta.text)
        self.finish_reason = delta.finish_reason

    def add_logprobs(self, details: tuple[TokenDetail, ...]) -> None:
        if self._logprobs is not None:
            self._logprobs.add(details)

    def logprobs(self) -> Iterator[bytes | PackedJSON]:
        """As JSON, in pieces."""
        return iter((b"null",)) if self._logprobs is None else self._logprobs.pieces()


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
            separator = b"," if items else b""
            items.write(separator + to_json(getattr(written, name))[1:-1])

    def pieces(self) -> Iterator[bytes | PackedJSON]:
        first, *others = self._empty.split(b"[]")
        yield first
        for items, after in zip(self._lists.values(), others, strict=True):
            yield b"["
            yield items
            yield b"]" + after


def with_logprobs(document: str, choices: Sequence[WholeChoice]) -> Iterator[bytes | PackedJSON]:
    """The reply in pieces: `document`, which has none, and theirs in their places."""
    first, *others = document.encode().split(NO_LOGPROBS)
    yield first
    for choice, after in zip(choices, others, strict=True):
        yield LOGPROBS
        yield from choice.logprobs()
        yield after
