"""Trial: bytes that are hardly ever a right request, on many connections at once. Design: S1, and S20's errors."""

import asyncio
from collections import Counter
from random import Random
from urllib.parse import urlsplit

from benchmarks import fault_clients
from benchmarks.fault_outcomes import OK
from benchmarks.raw_exchange import exchange, replies
from benchmarks.raw_requests import in_parts, mutated
from benchmarks.trial import Measure, Scale
from benchmarks.trial_server import SMALL, TrialServer, trial_server

FIXED = 17
AT_ONCE = 40  # connections: with one request in work each, no place is missed
GOOD_EVERY = 100
WARM = 2000  # requests, until what is held counts as before: pools and caches fill
#: A number that a mutation made large must not become minutes of an answer.
FLAGS = (*SMALL, "--max-model-len", "256")


def raw_http(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, FLAGS) as server:
        asyncio.run(sent(server, min(WARM, scale.raw_requests), Random(FIXED)))
        server.idle_after()
        before, engine = server.held(), server.engine()
        seen = asyncio.run(sent(server, scale.raw_requests, Random(FIXED + 1)))
        idle = server.idle_after()
        after = server.held()
        deaths = server.metrics().get("longwave:engine_deaths_total", 0.0) + (server.engine() != engine)
    statuses = {name: count for name, count in seen.items() if isinstance(name, int)}
    return [
        Measure("connections", seen["connections"]),
        Measure("replies", sum(statuses.values())),
        Measure("of them 200", statuses.get(OK, 0)),
        Measure("of them refusals (4xx)", sum(count for status, count in statuses.items() if 400 <= status < 500)),
        Measure("of them 503 with Retry-After", statuses.get(503, 0)),
        Measure("of other statuses, or 503 without it", seen["undocumented"], 0),
        Measure("errors in another shape than OpenAI's", seen["out of shape"], 0),
        Measure("errors that tell of the server's inside", seen["inside"], 0),
        Measure("bytes that are no reply", seen["no reply"], 0),
        Measure("connections that were not closed", seen["not closed"], 0),
        Measure("good requests beside them", seen["good"], 1, at_least=True),
        Measure("of them not answered", seen["good"] - seen["answered"], 0),
        Measure("deaths of the engine", deaths, 0),
        Measure("seconds until all KV blocks are free", idle, 1),
        Measure("files more than before", after.files - before.files, 0),
        Measure("growth of the process, MB", after.rss_mb - before.rss_mb, 50),
    ]


async def sent(server: TrialServer, count: int, random: Random) -> Counter[str | int]:
    """So many connections, AT_ONCE at any time: what came of them, and of each status how many replies."""
    seen: Counter[str | int] = Counter()
    left, port = iter(range(count)), urlsplit(server.url).port
    assert port is not None

    async def one_after_the_other() -> None:
        for number in left:
            judge(seen, await exchange(port, in_parts(random, mutated(random, server.target.model))))
            if number % GOOD_EVERY == 0:
                reply = await asyncio.to_thread(fault_clients.good, server.target)
                seen["good"] += 1
                seen["answered"] += reply.status == OK

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_the_other())
    return seen


def judge(seen: Counter[str | int], came: bytes | None) -> None:
    """Counts what came on one connection."""
    seen["connections"] += 1
    seen["not closed"] += came is None
    try:
        for reply in replies(came or b""):
            seen[reply.status] += 1
            seen["undocumented"] += not reply.is_documented
            seen["out of shape"] += not reply.is_in_shape
            seen["inside"] += reply.tells_of_the_inside
    except ValueError:
        seen["no reply"] += 1
