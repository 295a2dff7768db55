"""Work goes on when its caller is cancelled, is told of its end once, and can be ended."""

import asyncio

import pytest

from server.uninterrupted import Uninterrupted


async def failing() -> None:
    raise ValueError("as it must")


def test_work_ends_though_its_caller_is_cancelled() -> None:
    asyncio.run(cancelled_caller())


async def cancelled_caller() -> None:
    works, began, may_end, ends = Uninterrupted(), asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        began.set()
        await may_end.wait()
        ends.append("work")

    caller = asyncio.create_task(works.run(work(), lambda: ends.append("told")))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ends == []
    may_end.set()
    await asyncio.sleep(0.01)
    assert ends == ["work", "told"]


def test_a_result_and_an_error_are_the_caller_s() -> None:
    asyncio.run(result_and_error())


async def result_and_error() -> None:
    works, told = Uninterrupted(), list[int]()
    assert await works.run(asyncio.sleep(0, "done"), lambda: told.append(1)) == "done"
    with pytest.raises(ValueError, match="as it must"):
        await works.run(failing(), lambda: told.append(2))
    assert told == [1, 2]


def test_closing_ends_what_still_runs() -> None:
    asyncio.run(closing())


async def closing() -> None:
    works, told = Uninterrupted(), list[int]()
    caller = asyncio.create_task(works.run(asyncio.Event().wait(), lambda: told.append(1)))
    await asyncio.sleep(0)
    await works.close()
    assert told == [1]
    with pytest.raises(asyncio.CancelledError):
        await caller
    await works.close()
