"""Trial: a model whose chat template does not end with some messages, or makes texts without end. Design: S8, S6."""

import asyncio
from collections.abc import Awaitable

from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, closed_loop, open_loop
from benchmarks.trial_server import LITTLE, TrialServer, trial_server

LOOP = "{% for i in range(100000) %}HERE{% endfor %}"
ENDLESS = LOOP.replace("HERE", LOOP.replace("HERE", LOOP))
DOUBLED = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
TEMPLATE = (
    "{% if 'loop' in messages[0]['content'] %}" + ENDLESS + "{% elif 'grow' in messages[0]['content'] %}" + DOUBLED +
    "{% endif %}{{ messages[0]['content'] }}"
)  # fmt: skip
BOTH = ("loop", "grow")
ENDED = 4.0  # seconds until it is refused: 2 of a CPU, which others use as well
EVERY = 4.0  # seconds between two such requests
PROBES = 5.0  # a second
CLIENTS = 2  # that ask what is good, one thing after the other


def endless_template(scale: Scale) -> list[Measure]:
    with trial_server(LITTLE, template=TEMPLATE) as server:
        before = server.held()
        bad, probes, good = asyncio.run(_troubled(server, scale.seconds / 2))
        after = server.held()
    return [
        Measure("requests of such messages", len(bad)),
        Measure("not refused with 400", sum(answer.status != 400 for answer in bad), 0),
        Measure("seconds until they are refused, at most", max(answer.ms for answer in bad) / 1e3, ENDED),
        Measure("good requests beside them", len(good)),
        Measure("not answered", sum(not answer.is_whole for answer in good), 0),
        Measure("p99 ms", percentile([answer.ms for answer in good], 99)),
        Measure("probes, p99 ms", percentile([probe.ms for probe in probes], 99), 100),
        Measure("growth of the process, MB", after.rss_mb - before.rss_mb, 400),
    ]


async def _troubled(server: TrialServer, seconds: float) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Requests of such messages, and probes and good requests beside them."""

    def bad(number: int) -> Awaitable[Answer]:
        return ask(server.url, chat(server, BOTH[number % 2], 1))

    def good(number: int) -> Awaitable[Answer]:
        return ask(server.url, chat(server, f"{number} hello", 1))

    def probe(_number: int) -> Awaitable[Answer]:
        return ask(server.url, None, "/health/live")

    of_bad, of_probes, of_good = await asyncio.gather(
        open_loop(1 / EVERY, seconds, bad), open_loop(PROBES, seconds, probe), closed_loop(CLIENTS, seconds, good)
    )
    return of_bad, of_probes, of_good
