"""A request's body -> a stored file, without blocking the event loop. Must not know routes."""

import asyncio
from collections.abc import AsyncIterator

from server.files.catalog import StoredFile
from server.files.store import FileStore
from server.files.upload import Upload

PIECE_BYTES = 2**20  # what goes to a thread at once


async def receive_file(store: FileStore, content_type: str, body: AsyncIterator[bytes], owner: str) -> StoredFile:
    """Whatever happens, cancellation too, the upload is whole and listed or leaves nothing. Raises LongwaveError."""
    beginning = asyncio.ensure_future(asyncio.to_thread(store.begin, content_type, owner))
    try:
        upload = await asyncio.shield(beginning)
        piece = bytearray()
        async for chunk in body:
            piece += chunk
            if len(piece) >= PIECE_BYTES:
                await asyncio.to_thread(store.feed, upload, bytes(piece))
                piece.clear()
        await asyncio.to_thread(store.feed, upload, bytes(piece))
        return await asyncio.to_thread(store.finish, upload)
    finally:
        await asyncio.shield(_end(store, beginning))


async def _end(store: FileStore, beginning: asyncio.Future[Upload]) -> None:
    """Also of an upload that its request was cancelled before: a thread that has started goes on."""
    await asyncio.wait([beginning])
    if beginning.exception() is None:
        await asyncio.to_thread(store.end, beginning.result())
