"""Who goes on where several long readings share one thread: whoever came first and has least to read, whoever it is.
Knows no bodies and no API keys.

A hundred prompts that come together would otherwise all be read by halves until the last moment, and an engine that is
done with none has nothing to do meanwhile."""

import asyncio
import time
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BYTES_A_SECOND = 16e6  # by which size counts: 16 MB let pass short readings that come up to a second later


@dataclass(slots=True, order=True)
class _Place:
    due: float  # when it came, and so much later as it is long
    number: int
    is_first: asyncio.Event = field(compare=False)


class ReadingOrder:
    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._number = 0

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator["Reading"]:
        """Inside, the reading's turn() is to be called every few milliseconds; at once too."""
        self._number += 1
        mine = _Place(time.monotonic() + num_bytes / BYTES_A_SECOND, self._number, asyncio.Event())
        insort(self._places, mine)
        try:
            yield Reading(self._places, mine)
        finally:
            self._places.remove(mine)
            if self._places:
                self._places[0].is_first.set()


@dataclass(frozen=True, slots=True)
class Reading:
    _places: list[_Place]
    _mine: _Place

    async def turn(self) -> None:
        """Lets all others have theirs, and comes back when nobody goes first."""
        await asyncio.sleep(0)
        while self._places[0] is not self._mine:
            self._mine.is_first.clear()
            await self._mine.is_first.wait()
