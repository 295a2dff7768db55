"""JSON of megabytes, read strictly and a little at a time, so that the event loop has its turns; of several bodies one
at a time. Long lists of token ids are read in pieces and become TokenIds; all else is bounded in number first. Must not
know any schema."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from server import strict_json
from server.engine.token_ids import TokenIds
from server.errors import PayloadTooLarge
from server.reading_order import Reading, ReadingOrder

SMALL_BYTES = 64 * 2**10  # read at once: a few milliseconds, whatever is in it
LONG_LIST_BYTES = 4096  # of a list of token ids: a shorter one is read with all else
PIECE_BYTES = 64 * 2**10  # of a long list: a third of a millisecond
MOST_TOKEN_ID = 2**31 - 1

_order = ReadingOrder()
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


async def _loads(body: bytes, most_values: int, reading: Reading) -> Any:
    await reading.turn()
    # Of the same length, and every quotation mark left in it begins or ends a string.
    marked = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in body else body
    await reading.turn()
    if marked.count(b'"') > 4 * most_values:  # of a key and of a value two each
        raise _too_many(most_values)
    lists = [found async for found in _long_lists(marked, most_values, reading)]
    await reading.turn()
    word = f"0e{secrets.randbelow(10**32):032d}"  # a number that nobody could have guessed
    pieces, at = [], 0
    for found in lists:
        pieces += [body[at : found.start].decode("utf-8"), " ", word, " "]
        at = found.end
    pieces.append(body[at:].decode("utf-8"))
    await reading.turn()
    in_order = iter(lists)
    return strict_json.loads("".join(pieces), lambda number: next(in_order).ids if number == word else float(number))


async def _long_lists(marked: bytes, most_values: int, reading: Reading) -> AsyncIterator[_LongList]:
    """In their order. Raises PayloadTooLarge."""
    values, end = 0, 0
    for at, part in enumerate(marked.split(b'"')):
        start, end = end, end + len(part) + 1
        if at % 2:  # a string
            continue
        values += part.count(b",") + part.count(b"{") + part.count(b"[")
        opening, closing = part.find(b"["), -1
        if len(part) <= LONG_LIST_BYTES or part.count(b"[") > most_values:
            continue
        while opening >= 0:
            closing = part.find(b"]", opening) if closing < opening else closing
            if closing < 0:
                break
            following = part.find(b"[", opening + 1)
            if closing - opening > LONG_LIST_BYTES and not opening < following < closing:
                await reading.turn()
                ids = await _read(part[opening + 1 : closing], reading)
                if ids is not None:
                    values -= len(ids)  # as many as it has commas, and its bracket
                    yield _LongList(start + opening, start + closing + 1, ids)
            opening = following
    if values > most_values:
        raise _too_many(most_values)


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


def _too_many(most_values: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body has more than {most_values} values (long lists of token ids not counted)."
    )
