"""Long work on the event loop in pieces, few of them in each of its turns, whoever has some: with a hundred requests
that write out their prompts' log-probabilities a turn would else have a hundred, and everybody's next token wait for
all. Knows no work."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

PIECES = 4  # of a turn, which takes several milliseconds then; fewer would be more turns, each of which costs, too

T = TypeVar("T")


class LongWork:
    """In the order in which they ask."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PIECES)

    @asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """Inside, some milliseconds of work that waits for nothing."""
        async with self._places:
            yield
            await asyncio.sleep(0)

    async def next(self, items: Iterator[T]) -> T | None:
        """The next of them, which is a piece to make; None: there is none."""
        async with self.piece():
            return next(items, None)
