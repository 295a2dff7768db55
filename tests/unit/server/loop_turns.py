"""How long an event loop's longest turn is while a client asks something."""

import asyncio
import concurrent.futures
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from scripted_engine import LiveServer

T = TypeVar("T")

TRIES = 4


@contextmanager
def no_collections() -> Iterator[None]:
    """Of garbage: a full one walks through all that thousands of tests have left, in whichever thread it begins. A
    server has put what it imported aside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def watched(work: Awaitable[T]) -> tuple[T, float]:
    """What it returns, and the longest that the event loop did not come round meanwhile, in seconds of its thread's CPU
    time: what other threads and processes take is nobody's fault."""
    slowest = 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            slowest = max(slowest, time.thread_time() - before)

    with no_collections():
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        result = await work
        await asyncio.sleep(0.002)  # whatever came last counts
        watching.cancel()
    return result, slowest


def longest_turn(
    server: LiveServer, ask: Callable[[httpx.Client], T], *, limit: float = 0.0, tries: int = 1
) -> tuple[T, float]:
    """What `ask` returns, and the server's longest turn meanwhile. It asks again, up to so many `tries`, while that is
    not below `limit`: a machine may be three times as slow for a moment, in its CPU time, too."""
    for _ in range(tries):
        answer, slowest = _longest_turn(server, ask)
        if slowest < limit:
            break
    return answer, slowest


def _longest_turn(server: LiveServer, ask: Callable[[httpx.Client], T]) -> tuple[T, float]:
    answered: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def watch() -> float:
        _, slowest = await watched(asyncio.wrap_future(answered))
        return slowest

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    try:
        with server.client() as client:
            answer = ask(client)
    finally:
        answered.set_result(None)
    return answer, watching.result()


def slowest_turn(server: LiveServer, path: str, body: bytes, limit: float) -> tuple[int, Any, float]:
    """Status, reply, and the longest turn, at best of TRIES."""
    headers = {"content-type": "application/json"}
    reply, slowest = longest_turn(
        server, lambda client: client.post(path, content=body, headers=headers), limit=limit, tries=TRIES
    )
    return reply.status_code, reply.json(), slowest
