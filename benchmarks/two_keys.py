"""Trial: one API key asks for more long answers than there is room for, and another key has a short question."""

import asyncio
import os
import secrets
import time
from contextlib import suppress

from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat
from benchmarks.trial_server import QUEUE, SEATS, TrialServer, trial_server

FLOOD, QUIET = "flood", "quiet"
CLIENTS = SEATS + 2 * QUEUE  # of the flood: seats and queue are always full, and some are refused
LONG, SHORT = 2000, 16  # tokens of an answer
LIMIT_MS = 2000.0  # to a first token: a place is taken back from the flood after a quarter of a second
SETTLE = 5.0  # seconds in which the flood fills everything


def two_keys(scale: Scale) -> list[Measure]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LONGWAVE_API_KEY": f"{FLOOD},{QUIET}"}
    with trial_server(scale.model, environment=environment) as server:
        flood, quiet = asyncio.run(_both(server, scale.seconds))
    firsts = [answer.first_ms for answer in quiet if answer.first_ms is not None]
    return [
        Measure("answers of the flood", sum(answer.is_whole for answer in flood)),
        Measure("of it refused with Retry-After", sum(answer.is_refusal for answer in flood), 1, at_least=True),
        Measure("of it neither answered nor refused so", sum(not answer.is_clear for answer in flood), 0),
        Measure("questions of the other key", len(quiet), 1, at_least=True),
        Measure("of them not answered", sum(not answer.is_whole for answer in quiet), 0),
        Measure("first tokens of them, p50 ms", percentile(firsts, 50)),
        Measure("first tokens of them, p99 ms", percentile(firsts, 99), LIMIT_MS),
    ]


async def _both(server: TrialServer, seconds: float) -> tuple[list[Answer], list[Answer]]:
    """Answers of the flood that were there when the other key had asked for so long, and that key's."""
    flood: list[Answer] = []

    async def client() -> None:
        while True:
            flood.append(await _asked(server, FLOOD, LONG))
            if flood[-1].is_refusal:
                await asyncio.sleep(1)

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(SETTLE)
    quiet, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        quiet.append(await _asked(server, QUIET, SHORT))
    for task in clients:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return flood, quiet


async def _asked(server: TrialServer, key: str, tokens: int) -> Answer:
    return await ask(server.url, chat(server, f"Say hello {secrets.token_hex(4)}.", tokens, stream=True), key=key)
