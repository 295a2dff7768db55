"""JSON of any size as one reply, sent a piece at a time: other requests have their turns meanwhile, and nobody makes a
copy of all of it. Must not know what it says."""

import asyncio
from collections.abc import Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 256 * 2**10


class PiecewiseJSON(Response):
    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes | bytearray]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))}, media_type=self.media_type)
        self.pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in _parts(self.pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def _parts(pieces: Sequence[bytes | bytearray]) -> Iterator[bytes]:
    part = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), PIECE_BYTES):
            part += piece[at : at + PIECE_BYTES]
            if len(part) >= PIECE_BYTES:
                yield bytes(part)
                part.clear()
    yield bytes(part)
