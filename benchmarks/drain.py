"""Trial: SIGTERM under load: streams that run and wait come to their ends, who comes meanwhile is refused. Design: R7,
with as many streams as a little server has places for."""

import asyncio
import signal
import time

from benchmarks.trial import Measure, Scale
from benchmarks.trial_client import Answer, ask, chat
from benchmarks.trial_server import QUEUE, SEATS, SMALL, TrialServer, trial_server

STREAMS = SEATS + QUEUE
TOKENS = 300  # of each stream
RATE = 50.0  # newcomers a second, from before the signal to the server's end
BEFORE = 1.0  # seconds of load before the signal
BUDGET = 60.0  # --shutdown-timeout
GRACE = 5.0


def drain(scale: Scale) -> list[Measure]:
    streams: list[Answer] = []
    newcomers: list[Answer] = []
    codes: list[int] = []
    longest = 0.0
    for _ in range(scale.drains):
        with trial_server(scale.model, (*SMALL, "--shutdown-timeout", f"{BUDGET:g}")) as server:
            some, others, seconds = asyncio.run(_terminated(server))
            assert server.target.process is not None
            codes.append(server.target.process.wait())
        streams += some
        newcomers += others
        longest = max(longest, seconds)
    reached = [answer for answer in newcomers if answer.reached]
    return [
        Measure("signals", scale.drains),
        Measure("streams", len(streams)),
        Measure("of them cut", sum(not answer.is_whole for answer in streams), 0),
        Measure("newcomers", len(newcomers)),
        Measure("of them refused with Retry-After", sum(answer.is_refusal for answer in newcomers), 1, at_least=True),
        Measure("of them with a connection and no reply", sum(answer.status is None for answer in reached), 0),
        Measure("of them neither answered nor refused", sum(not answer.is_clear for answer in reached), 0),
        Measure("seconds from the signal to the end, at most", longest, BUDGET + GRACE),
        Measure("exit codes that are not 0", sum(code != 0 for code in codes), 0),
    ]


async def _terminated(server: TrialServer) -> tuple[list[Answer], list[Answer], float]:
    """The streams, the newcomers, and the seconds until the server had ended."""
    process = server.target.process
    assert process is not None
    newcomers: list[asyncio.Task[Answer]] = []

    async def come() -> None:
        begin = time.monotonic()
        while process.poll() is None:
            newcomers.append(asyncio.create_task(ask(server.url, chat(server, f"{len(newcomers)} Hello.", 2))))
            await asyncio.sleep(max(0.0, begin + len(newcomers) / RATE - time.monotonic()))

    streams = [
        asyncio.create_task(ask(server.url, chat(server, f"{number} Count.", TOKENS, stream=True)))
        for number in range(STREAMS)
    ]
    await asyncio.sleep(BEFORE)
    coming = asyncio.create_task(come())
    await asyncio.sleep(BEFORE)
    process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    await coming
    seconds = time.monotonic() - signalled
    return await asyncio.gather(*streams), await asyncio.gather(*newcomers), seconds
