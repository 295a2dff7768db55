"""Trial: five times as many requests as the server can answer, at their own times. Design: R4, and R21's probes."""

import asyncio
import time

from benchmarks import fault_clients
from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, capacity_of, open_loop, rate_between, sender
from benchmarks.trial_server import QUEUE, SEATS, TrialServer, trial_server

TOKENS = 128  # of which a server of a little model has some thousand a second
TIMES, ENOUGH = 5, 4  # of what was answered a second before, and of that or what is afterwards, if more
CLIENTS = SEATS + QUEUE // 2  # of the closed loop that finds the capacity: seats are never empty
PROBES = 10.0  # a second


def overload(scale: Scale) -> list[Measure]:
    with trial_server(scale.model) as server:
        alone = _alone_ms(server)
        first = asyncio.run(capacity_of(server, CLIENTS, TOKENS, scale.seconds / 2))
        server.idle_after()
        before = server.held()
        flood, probes = asyncio.run(_flooded(server, TIMES * first, scale.seconds))
        idle = server.idle_after()
        after = server.held()
        recovered = _recovered_after(server, alone)
        capacity = max(first, asyncio.run(capacity_of(server, CLIENTS, TOKENS, scale.seconds / 2)))
        return [*_of_answers(flood, capacity, scale.seconds), *_of_server(probes, idle, recovered),
                Measure("growth of the process, MB", after.rss_mb - before.rss_mb, 50)]  # fmt: skip


async def _flooded(server: TrialServer, rate: float, seconds: float) -> tuple[list[Answer], list[Answer]]:
    """The answers of the flood, and those of probes beside it."""
    flood = asyncio.create_task(open_loop(rate, seconds, sender(server, TOKENS)))
    probes = await open_loop(PROBES, seconds, lambda _number: ask(server.url, None, "/health/live"))
    return await flood, probes


def _of_answers(flood: list[Answer], capacity: float, seconds: float) -> list[Measure]:
    begin = min(answer.sent for answer in flood) + seconds / 4
    end = max(answer.sent for answer in flood)
    whole = [answer for answer in flood if answer.is_whole]
    refused = [answer for answer in flood if answer.is_refusal]
    firsts = [answer.first_ms for answer in whole if answer.first_ms is not None]
    goodput = rate_between(flood, begin, end)
    return [
        Measure("requests", len(flood)),
        Measure("capacity, answers a second", capacity),
        Measure("requests of what is answered in that time", len(flood) / seconds / capacity, ENOUGH, at_least=True),
        Measure("goodput of the capacity", goodput / capacity, 0.9, at_least=True),
        Measure("refused with Retry-After", len(refused), 1, at_least=True),
        Measure("neither answered nor refused so", len(flood) - len(whole) - len(refused), 0),
        Measure("refusals, p50 ms", percentile([answer.ms for answer in refused], 50)),
        Measure("refusals, p99 ms", percentile([answer.ms for answer in refused], 99), 20),
        Measure("accepted, p99 ms to the first token", percentile(firsts, 99)),
    ]


def _of_server(probes: list[Answer], idle: float, recovered: float) -> list[Measure]:
    return [
        Measure("probes, p99 ms", percentile([probe.ms for probe in probes], 99), 20),
        Measure("probes that failed", sum(probe.status != 200 for probe in probes), 0),
        Measure("seconds until all KV blocks are free", idle, 1),
        Measure("seconds until a request is as quick as before", recovered, 5),
    ]


def _alone_ms(server: TrialServer) -> float:
    fault_clients.good(server.target)
    return percentile([fault_clients.good(server.target).ms for _ in range(9)], 90)


def _recovered_after(server: TrialServer, alone_ms: float) -> float:
    begin = time.monotonic()
    while fault_clients.good(server.target).ms > 2 * alone_ms and time.monotonic() - begin < fault_clients.RECOVERY:
        pass
    return time.monotonic() - begin
