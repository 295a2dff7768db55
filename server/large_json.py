"""JSON of megabytes, read strictly and a little at a time, so that the event loop has its turns; of several bodies one
at a time. Long lists of token ids are read in pieces and become TokenIds; all else is bounded in number first, and read
in a thread. Must not know any schema."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from server import strict_json
from server.engine.token_ids import TokenIds
from server.errors import PayloadTooLarge
from server.reading_order import Reading, ReadingOrder

SMALL_BYTES = 64 * 2**10  # read at once: a few milliseconds, whatever is in it
LONG_LIST_BYTES = 4096  # of a list of token ids: a shorter one is read with all else
PIECE_BYTES = 64 * 2**10  # of a long list: a third of a millisecond
LOOK_BYTES = 2**20  # looked through at once: a few milliseconds, whatever is in it
LOOKS = 1024  # at strings or brackets: a millisecond
MOST_TOKEN_ID = 2**31 - 1

T = TypeVar("T")

_order = ReadingOrder()
_thread = ThreadPoolExecutor(1, thread_name_prefix="large-json")
_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKEN_ID)]])


@dataclass(frozen=True, slots=True)
class _LongList:
    start: int  # of its bracket in the body
    end: int  # behind its bracket
    ids: TokenIds


async def loads(body: bytes, most_values: int) -> Any:
    """What strict_json.loads gives and raises, but long lists of token ids are TokenIds. Raises PayloadTooLarge for
    more than `most_values` values beside those, UnicodeDecodeError (a ValueError) for what is no UTF-8."""
    if len(body) <= SMALL_BYTES:
        return strict_json.loads(body.decode("utf-8"))
    async with _order.place(len(body)) as reading:
        return await _loads(body, most_values, reading)


async def in_thread(work: Callable[[], T]) -> T:
    """For what is done with a large body, one after the other."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


async def _loads(body: bytes, most_values: int, reading: Reading) -> Any:
    await reading.turn()
    marked = await _marked(body, reading) if b"\\" in body else body
    lists = [found async for found in _long_lists(marked, most_values, reading)]
    await reading.turn()
    return await in_thread(lambda: _around(lists, body))


async def _marked(body: bytes, reading: Reading) -> bytes:
    """Of the same length, and every quotation mark left in it begins or ends a string."""
    pieces, at = [], 0
    while at < len(body):
        await reading.turn()
        piece = body[at : at + LOOK_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes belongs to it
            piece = body[at : at + LOOK_BYTES + 1]
        pieces.append(piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  "))
        at += len(piece)
    return b"".join(pieces)


def _around(lists: Sequence[_LongList], body: bytes) -> Any:
    """All of it, with these lists in their places."""
    word = f"0e{secrets.randbelow(10**32):032d}"  # a number that nobody could have guessed
    pieces, at = [], 0
    for found in lists:
        pieces += [body[at : found.start].decode("utf-8"), " ", word, " "]
        at = found.end
    pieces.append(body[at:].decode("utf-8"))
    in_order = iter(lists)
    return strict_json.loads(
        "".join(pieces),
        lambda number: next(in_order).ids if number == word else float(number),
        _whole_number,
    )


async def _long_lists(marked: bytes, most_values: int, reading: Reading) -> AsyncIterator[_LongList]:
    """In their order. Raises PayloadTooLarge."""
    values = 0
    for at, (start, part) in enumerate(_outside_strings(marked)):
        if at % LOOKS == 0:
            await reading.turn()
        if at > 2 * most_values:  # strings: a key and a value each
            raise _too_many(most_values)
        values += await _num_values(part, reading)
        if len(part) > LONG_LIST_BYTES and part.count(b"[") <= most_values:
            async for found in _lists_in(part, start, reading):
                values -= len(found.ids)  # as many as it has commas, and its bracket
                yield found
        if values > most_values:  # no later part takes any back
            raise _too_many(most_values)


def _outside_strings(marked: bytes) -> Iterator[tuple[int, bytes]]:
    """What is between strings, and where."""
    start = 0
    while start <= len(marked):
        begin = marked.find(b'"', start)
        if begin < 0:
            begin = len(marked)
        yield start, marked[start:begin]
        end = marked.find(b'"', begin + 1)
        start = end + 1 if end >= 0 else len(marked) + 1


async def _num_values(part: bytes, reading: Reading) -> int:
    if len(part) <= LOOK_BYTES:
        return sum(map(part.count, (b",", b"{", b"[")))
    counted = 0
    for at in range(0, len(part), LOOK_BYTES):
        await reading.turn()
        counted += sum(map(part[at : at + LOOK_BYTES].count, (b",", b"{", b"[")))
    return counted


async def _lists_in(part: bytes, start: int, reading: Reading) -> AsyncIterator[_LongList]:
    """Of a part that begins at `start`."""
    opening, closing, looks = part.find(b"["), -1, 0
    while opening >= 0:
        looks += 1
        if looks % LOOKS == 0:
            await reading.turn()
        closing = part.find(b"]", opening) if closing < opening else closing
        if closing < 0:
            return
        following = part.find(b"[", opening + 1)
        if closing - opening > LONG_LIST_BYTES and not opening < following < closing:
            await reading.turn()
            ids = await _read(part[opening + 1 : closing], reading)
            if ids is not None:
                yield _LongList(start + opening, start + closing + 1, ids)
        opening = following


async def _read(text: bytes, reading: Reading) -> TokenIds | None:
    """None: it is something else."""
    ids, at = TokenIds(), 0
    while at <= len(text):
        end = text.find(b",", at + PIECE_BYTES)
        end = len(text) if end < 0 else end
        try:
            piece = _ids.decode(b"[" + text[at:end] + b"]")
        except msgspec.MsgspecError:
            return None
        if not piece:  # after a last comma
            return None
        ids.extend(piece)
        at = end + 1
        await reading.turn()
    return ids


def _whole_number(digits: str) -> int:
    """Python's own way keeps the GIL from the first number to the last: half a second, of thousands of digits each."""
    return int(digits)


def _too_many(most_values: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body has more than {most_values} values (long lists of token ids not counted)."
    )
