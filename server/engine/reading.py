"""What an engine process says, from its first message to its last, whatever ends it. Knows no message."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from server.engine.messages import FromEngine
from server.engine.process import EngineProcess
from server.engine.silence import until_silent


async def read_to_the_end(
    engine: EngineProcess,
    take: Callable[[list[FromEngine]], None],
    limits: Mapping[Callable[[], float | None], float],
) -> float | None:
    """Returns when the process has ended and all that it sent was taken. One that is silent for longer than a limit of
    `limits`, by last word and as `until_silent` says, is ended: a device that hangs does not come back. That limit is
    returned, if it was why. Raises what take() does."""
    reader = asyncio.create_task(_read(engine, take), name="engine-reader")
    end = asyncio.create_task(engine.ended.wait())
    silences = {asyncio.create_task(until_silent(word, limit)): limit for word, limit in limits.items()}
    try:
        await asyncio.wait((reader, end, *silences), return_when=asyncio.FIRST_COMPLETED)
        exceeded = None if end.done() else next((limit for task, limit in silences.items() if task.done()), None)
        if exceeded is not None:
            engine.kill()
            await end
        if not end.done():
            reader.result()  # the reader never returns: raises what stopped it
        await _cancel(reader)  # first: two readers of one socket would take each other's frames
        async for messages in engine.rest():
            take(messages)
        return exceeded
    finally:
        await _cancel(reader, end, *silences)


async def _read(engine: EngineProcess, take: Callable[[list[FromEngine]], None]) -> None:
    while True:
        take(await engine.receive())
        await asyncio.sleep(0)  # a socket that always has something to read must not hold the loop


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
