"""What an engine process says, from its first message to its last, whatever ends it. Knows no message."""

import asyncio
from collections.abc import Callable
from typing import Any

from server.engine.messages import FromEngine
from server.engine.process import EngineProcess
from server.engine.silence import until_silent


async def read_to_the_end(
    engine: EngineProcess,
    take: Callable[[list[FromEngine]], None],
    last_word: Callable[[], float | None],
    max_silence: float,
) -> bool:
    """Returns when the process has ended and all that it sent was taken. One that is silent for too long, as
    `until_silent` says, is ended: a device that hangs does not come back. Was that why? Raises what take() does."""
    reader = asyncio.create_task(_read(engine, take), name="engine-reader")
    end = asyncio.create_task(engine.ended.wait())
    silent = asyncio.create_task(until_silent(last_word, max_silence))
    try:
        await asyncio.wait((reader, end, silent), return_when=asyncio.FIRST_COMPLETED)
        was_silent = silent.done() and not end.done()
        if was_silent:
            engine.kill()
            await end
        if not end.done():
            reader.result()  # the reader never returns: raises what stopped it
        await _cancel(reader)  # first: two readers of one socket would take each other's frames
        async for messages in engine.rest():
            take(messages)
        return was_silent
    finally:
        await _cancel(reader, end, silent)


async def _read(engine: EngineProcess, take: Callable[[list[FromEngine]], None]) -> None:
    while True:
        take(await engine.receive())
        await asyncio.sleep(0)  # a socket that always has something to read must not hold the loop


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
