"""Trial: many of the largest prompts at once, some that a model can take and some that are only read. Design: S6."""

import asyncio
import secrets
from collections.abc import Sequence

from benchmarks.fault_outcomes import OK
from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, open_loop
from benchmarks.trial_server import TrialServer, trial_server

PROBES = 20.0  # a second
LEGAL_WORDS = 1150  # of some seven tokens: less than the model's 8,192 tokens, but hardly
READ_BYTES = 4 * 10**6  # of a text that must be read before it is found to be too long
READ = 10  # of those
FLAGS = ("--max-queued-requests", "600")
TOO_LONG = 400


def largest_prompts(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, FLAGS) as server:
        legal, beside_legal = asyncio.run(_sent(server, [_legal(server) for _ in range(scale.prompts_at_once)]))
        too_long = chat(server, "word " * (READ_BYTES // 5), 1)
        long, beside_long = asyncio.run(_sent(server, [too_long] * READ))
        idle = server.idle_after()
    probes = [*beside_legal, *beside_long]
    return [
        Measure("prompts of nearly 8,192 tokens at once", len(legal)),
        Measure("of them not answered", sum(not answer.is_whole for answer in legal), 0),
        Measure("probes of health beside them, p99 ms", percentile([probe.ms for probe in beside_legal], 99), 100),
        Measure("prompts of 4 MB at once", len(long)),
        Measure("of them not refused in words", sum(one.status != TOO_LONG or not one.has_error for one in long), 0),
        Measure("probes of health beside those, p99 ms", percentile([probe.ms for probe in beside_long], 99)),
        Measure("probes", len(probes), 20, at_least=True),
        Measure("of them failed", sum(probe.status != OK for probe in probes), 0),
        Measure("seconds until all KV blocks are free", idle, 1),
    ]


def _legal(server: TrialServer) -> bytes:
    return chat(server, " ".join(secrets.token_hex(3) for _ in range(LEGAL_WORDS)), 1)


async def _sent(server: TrialServer, bodies: Sequence[bytes]) -> tuple[list[Answer], list[Answer]]:
    """The answers to all of them, sent at once; and what probes were told meanwhile."""
    everything = asyncio.gather(*(ask(server.url, body) for body in bodies))
    probes: list[Answer] = []
    while not everything.done():
        probes += await open_loop(PROBES, 1.0, lambda _number: ask(server.url, None, "/health/live"))
    return await everything, probes
