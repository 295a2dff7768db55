"""Readings that come together are done one after the other, and nobody waits for ever."""

import asyncio
from types import SimpleNamespace

import pytest

from server import reading_order
from server.reading_order import BYTES_A_SECOND, ReadingOrder

TURNS = 4
SECOND = round(BYTES_A_SECOND)  # bytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(reading_order, "time", SimpleNamespace(monotonic=lambda: now[0]))  # the event loop has its own
    return now


class Readers:
    def __init__(self) -> None:
        self.order = ReadingOrder()
        self.log = ""

    async def read(self, name: str, num_bytes: int) -> None:
        async with self.order.place(num_bytes) as reading:
            for _ in range(TURNS):
                await reading.turn()
                self.log += name

    def start(self, name: str, num_bytes: int) -> "asyncio.Task[None]":
        return asyncio.create_task(self.read(name, num_bytes))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_bodies_of_one_size_are_read_in_their_order(clock: list[float]) -> None:
    async def main() -> str:
        readers = Readers()
        await asyncio.gather(*(readers.start(name, SECOND) for name in "abc"))
        return readers.log

    assert asyncio.run(main()) == TURNS * "a" + TURNS * "b" + TURNS * "c"


def test_a_short_one_passes_a_long_one_that_has_begun(clock: list[float]) -> None:
    async def main() -> str:
        readers = Readers()
        long = readers.start("L", 2 * SECOND)
        await turns(3)
        clock[0] += 1.0
        await asyncio.gather(long, readers.start("s", SECOND // 2))
        return readers.log

    log = asyncio.run(main())
    assert log.startswith("L")
    assert TURNS * "s" in log
    assert log.endswith("L")


def test_a_long_one_is_not_passed_for_ever(clock: list[float]) -> None:
    async def main() -> str:
        readers = Readers()
        first = readers.start("L", 2 * SECOND)
        await turns(2)
        others = []
        for name in "abcdef":
            clock[0] += 0.5
            others.append(readers.start(name, SECOND))
            await turns(1)
        await asyncio.gather(first, *others)
        return readers.log

    log = asyncio.run(main())
    assert log.rindex("a") < log.rindex("L") < log.index("b"), log  # b came a second later, and needs another


@pytest.mark.parametrize("who", [0, 1])
def test_who_gives_up_stops_nobody(clock: list[float], who: int) -> None:
    async def main() -> str:
        readers = Readers()
        tasks = [readers.start(name, SECOND) for name in "abc"]
        await turns(2)
        tasks[who].cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        return readers.log

    log = asyncio.run(main())
    assert log.replace("ab"[who], "") == TURNS * ("b" if who == 0 else "a") + TURNS * "c"
