"""Work that runs to its end though whoever waits for it goes away. All of it runs on one event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Uninterrupted:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], ended: Callable[[], None] | None = None) -> T:
        """`ended` is called when the work has ended, however it did."""

        def done(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # seen, even if nobody waits for it
            if ended is not None:
                ended()

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """What still runs is cancelled, and has ended after this."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
