"""Work that ends when nobody waits for it any more. Must not know what the work is."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):  # noqa: N818 - not a failure of anything
    """The client went away before its answer was complete."""


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. When the client goes first: cancels the work, waits for its end, raises ClientDisconnected."""
    working = asyncio.create_task(work)
    listening = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, listening):
            task.cancel()
            with suppress(BaseException):
                await task
