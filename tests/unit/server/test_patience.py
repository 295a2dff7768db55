"""Waits with a limit and one timer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest

from server.patience import Patience

LONG = 60.0
MANY = 1000


def run(test: Callable[[Patience], Awaitable[None]]) -> None:
    async def whole() -> None:
        with closing(Patience()) as patience:
            await test(patience)

    asyncio.run(whole())


def test_a_wait_ends_at_its_limit_and_the_next_one_is_new() -> None:
    async def waits(patience: Patience) -> None:
        loop = asyncio.get_running_loop()
        with patience.limit(LONG):
            await asyncio.sleep(0)
        for _ in range(2):
            begun = loop.time()
            with pytest.raises(TimeoutError), patience.limit(0.02):
                await asyncio.Event().wait()
            assert 0.019 <= loop.time() - begun < LONG
        with patience.limit(None):
            await asyncio.sleep(0.03)

    run(waits)


def test_a_limit_counts_from_its_own_beginning() -> None:
    async def waits(patience: Patience) -> None:
        loop = asyncio.get_running_loop()
        with patience.limit(0.05):
            time.sleep(0.04)  # the loop is held up: however long it takes, no timer rings
        begun = loop.time()
        with pytest.raises(TimeoutError), patience.limit(0.05):  # the timer of the first rings meanwhile
            await asyncio.Event().wait()
        assert loop.time() - begun >= 0.049

    run(waits)


def test_many_waits_set_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(patience: Patience) -> None:
        loop = asyncio.get_running_loop()
        timers: list[float] = []
        real = loop.call_at

        def call_at(when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
            timers.append(when)
            return real(when, *rest, **more)

        monkeypatch.setattr(loop, "call_at", call_at)
        for _ in range(MANY):
            with patience.limit(LONG):
                await asyncio.sleep(0)
        assert len(timers) == 1

    run(waits)


def test_who_is_cancelled_by_others_is_not_told_of_a_limit() -> None:
    async def waits(patience: Patience) -> None:
        async def wait() -> None:
            with patience.limit(LONG):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(waits)
