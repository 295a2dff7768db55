"""Trial: mixed traffic for a while, after which a server holds what it held before. Design: R27."""

import asyncio
import itertools
import time
from collections import Counter

from benchmarks.mixed_traffic import MIXED, Kind, job
from benchmarks.trial import Measure, Scale
from benchmarks.trial_server import Held, TrialServer, held, trial_server

CLIENTS = 6
JOB_EVERY = 800  # requests: one fine-tuning job, whose model is asked and deleted
WARM = 0.25  # of the time, until what is held counts as before: caches fill
LOOK = 0.5  # seconds between two looks at threads
GROWTH_MB = 20  # of the process, and of the engine's: a first part of a day's


def soak(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, weights=True) as server:
        bad: Counter[str] = Counter()
        begin = time.monotonic()
        count, threads_before = asyncio.run(_mixed(server, scale.soak_seconds * WARM, bad))
        before = _both(server)
        warm = time.monotonic() - begin
        more, threads = asyncio.run(_mixed(server, scale.soak_seconds - warm, bad))
        idle = server.idle_after()
        after = _both(server)
        minutes = (time.monotonic() - begin) / 60
        deaths = server.metrics().get("longwave:engine_deaths_total", 0.0)
    (api, engine), (api_before, engine_before) = after, before
    files = api.files + engine.files - api_before.files - engine_before.files
    return [
        Measure("minutes", minutes),
        Measure("requests", count + more),
        Measure("neither answered nor refused as they must be", bad.total(), 0),
        Measure("deaths of the engine", deaths, 0),
        Measure("growth of the process, MB", api.rss_mb - api_before.rss_mb, GROWTH_MB),
        Measure("growth of the engine, MB", engine.rss_mb - engine_before.rss_mb, GROWTH_MB),
        Measure("files more than before", files, 0),
        Measure("threads at once, more than before", threads - threads_before, 0),
        Measure("seconds until all KV blocks are free", idle, 1),
    ]


def _both(server: TrialServer) -> tuple[Held, Held]:
    """Of the server's process and its engine, with nothing to do."""
    server.idle_after()
    engine = server.engine()
    assert engine is not None
    return server.held(), held(engine)


async def _mixed(server: TrialServer, seconds: float, bad: Counter[str]) -> tuple[int, int]:
    """Clients that ask one thing after the other; how many requests, and the most threads of both processes at once
    (pools of threads grow when they are wanted, and shrink)."""
    end, numbers, most = time.monotonic() + seconds, itertools.count(), 0

    async def client() -> None:
        while time.monotonic() < end:
            number = next(numbers)
            kind: Kind = job if number % JOB_EVERY == JOB_EVERY // 2 else MIXED[number % len(MIXED)]
            if not await kind(server, number):
                bad[kind.__name__] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
        while time.monotonic() < end:
            engine = server.engine()
            most = max(most, server.held().threads + (0 if engine is None else held(engine).threads))
            await asyncio.sleep(LOOK)
    return next(numbers), most
