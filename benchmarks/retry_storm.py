"""Trial: OpenAI's own client, whose retries come back to a server that is full, and to one whose engine restarts.
Design: R19."""

import asyncio
import os
import signal
import time
from typing import Any

import openai

from benchmarks.trial import Measure, Scale
from benchmarks.trial_client import capacity_of
from benchmarks.trial_server import BLOCKS, TrialServer, trial_server

RETRIES = 5
TOKENS = 64
SEATS, QUEUE = 4, 8
PLACES = SEATS + QUEUE
MEASURED = 20.0  # seconds, in which the capacity is
SERVABLE = 15.0  # seconds, in which all clients can be answered: five retries are over after thirty, more or less
FULL = ("--max-num-seqs", str(SEATS), "--max-queued-requests", str(QUEUE), *BLOCKS)
WINDOW = 0.1  # seconds: what comes within them comes at once
SHARE = 0.15  # of all retries that may: spread evenly over ten seconds it would be a hundredth
ANSWERED = ("stop", "length")
TIMEOUT = 300.0


def retry_storm(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, FULL) as server:
        capacity = asyncio.run(capacity_of(server, PLACES, TOKENS, MEASURED))
        clients = max(PLACES + 1, min(scale.clients, int(SERVABLE * capacity)))
        full = _Storm(server)
        asyncio.run(full.ask(clients))
        restarting = _Storm(server)
        asyncio.run(restarting.ask(clients, kill_after=0.3))
        idle = server.idle_after()
        return [
            Measure("capacity, answers a second", capacity),
            *full.measures("full server"),
            *restarting.measures("restarting engine"),
            Measure("seconds until all KV blocks are free", idle, 1),
        ]


class _Storm:
    """Clients that all ask in the same moment, once each, and what the server made of it."""

    def __init__(self, server: TrialServer) -> None:
        self._server = server
        self._attempts: list[float] = []
        self._succeeded = self._clients = 0
        self._served = 0.0
        self._seconds = 0.0
        self._before = self._answered()

    async def ask(self, clients: int, kill_after: float | None = None) -> None:
        async def note(_request: Any) -> None:
            self._attempts.append(time.monotonic())

        begin = time.monotonic()
        async with openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]}) as http:
            client = openai.AsyncOpenAI(
                base_url=f"{self._server.url}/v1",
                api_key="none",
                max_retries=RETRIES,
                timeout=TIMEOUT,
                http_client=http,
            )
            asked = [asyncio.create_task(self._ask(client, number)) for number in range(clients)]
            if kill_after is not None:
                await asyncio.sleep(kill_after)
                engine = self._server.engine()
                assert engine is not None
                os.kill(engine, signal.SIGKILL)
            answered = await asyncio.gather(*asked)
        self._clients, self._succeeded, self._seconds = clients, sum(answered), time.monotonic() - begin
        self._served = self._answered() - self._before

    def measures(self, name: str) -> list[Measure]:
        retries = sorted(self._attempts)[self._clients :]
        return [
            Measure(f"{name}: clients", self._clients),
            Measure(f"{name}: clients without an answer", self._clients - self._succeeded, 0),
            Measure(f"{name}: retries", len(retries)),
            Measure(f"{name}: largest share of retries in {WINDOW:g} s", crowd(retries, WINDOW), SHARE),
            Measure(f"{name}: answers that nobody got", self._served - self._succeeded, 0),
            Measure(f"{name}: seconds until the last answer", self._seconds),
        ]

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> bool:
        try:
            reply = await client.chat.completions.create(
                model=self._server.target.model,
                messages=[{"role": "user", "content": f"{number} Say hello."}],
                max_tokens=TOKENS,
                temperature=0,
            )
        except openai.APIError:
            return False
        return reply.choices[0].finish_reason in ANSWERED

    def _answered(self) -> float:
        now = self._server.metrics()
        return sum(now.get(f"longwave:request_success_total{{{reason}}}", 0.0) for reason in ANSWERED)


def crowd(moments: list[float], window: float) -> float:
    """The largest share of these that lie within so many seconds of each other; 0 of none."""
    ordered, largest, first = sorted(moments), 0, 0
    for last, moment in enumerate(ordered):
        while moment - ordered[first] > window:
            first += 1
        largest = max(largest, last - first + 1)
    return largest / len(ordered) if ordered else 0.0
