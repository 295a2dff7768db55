"""JSON of any size as one reply, sent a piece at a time: other requests have their turns meanwhile, and nobody makes a
copy of all of it. Must not know what it says."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.reply_memory import memory
from server.schemas.packed_json import PackedJSON

PIECE_BYTES = 256 * 2**10


class PiecewiseJSON(Response):
    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes | PackedJSON], held: ExitStack | None = None) -> None:
        """`held`: what is closed when nothing of it is in memory any more."""
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))}, media_type=self.media_type)
        self.pieces = pieces
        self.held = held or ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self.held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in parts(self.pieces):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})


def written(document: bytes, param: str | None = None) -> PiecewiseJSON:
    """Counts among what replies hold. Raises InvalidRequest, about `param`, and ServerOverloaded."""
    with ExitStack() as stack:
        stack.enter_context(memory.reply()).write(len(document), param)
        return PiecewiseJSON([document], stack.pop_all())


def parts(pieces: Iterable[bytes | PackedJSON]) -> Iterator[bytes]:
    """All of them in parts of PIECE_BYTES or somewhat more. What is packed is taken."""
    part = bytearray()
    for piece in pieces:
        for some in piece.take() if isinstance(piece, PackedJSON) else _slices(piece):
            part += some
            if len(part) >= PIECE_BYTES:
                yield bytes(part)
                part.clear()
    yield bytes(part)


def _slices(piece: bytes) -> Iterator[bytes]:
    for at in range(0, len(piece), PIECE_BYTES):
        yield piece[at : at + PIECE_BYTES]
