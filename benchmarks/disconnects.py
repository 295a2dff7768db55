"""Trial: clients that leave, wherever their requests are. Design: R1."""

import asyncio
import random

from benchmarks.trial import Measure, Scale
from benchmarks.trial_client import Answer, Leave, ask, chat
from benchmarks.trial_server import QUEUE, SEATS, SMALL, TrialServer, trial_server

TOKENS = 2000  # of answers that nobody wants: what leaks would be seen for long
AT_ONCE = SEATS + QUEUE // 4  # so that some of them are still queued
LONG = "wave " * 500
WHOLE_LIMIT = 0.5  # seconds, at most, that who wants no stream waits
FIXED = 17
CHUNKED = (*SMALL, "--max-num-batched-tokens", "256")  # LONG takes several steps, and none takes seconds on a CPU


def disconnects(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, CHUNKED) as server:
        asyncio.run(_leave(server, 2 * len(KINDS)))
        server.idle_after()
        before = server.held()
        answers = asyncio.run(_leave(server, scale.disconnects))
        idle = server.idle_after()
        after = server.held()
        places = asyncio.run(_all_places(server))
        statuses = [answer.status for answer in answers]
        return [
            Measure("clients that left", len(answers)),
            Measure("of them in their streams", sum(answer.first is not None for answer in answers)),
            Measure("of them refused", sum(status not in (200, None) for status in statuses), 0),
            Measure("seconds until all KV blocks are free", idle, 1),
            Measure("places for requests that were lost", SEATS + QUEUE - places, 0),
            Measure("files more than before", after.files - before.files, 0),
            Measure("threads more than before", after.threads - before.threads, 0),
            Measure("growth of the process, MB", after.rss_mb - before.rss_mb, 16),
        ]


def _at_text(_came: bytes, has_text: bool) -> bool:
    return has_text


def _at_head(came: bytes, _has_text: bool) -> bool:
    return b"\r\n\r\n" in came


async def _in_stream(server: TrialServer, number: int) -> Answer:
    return await _ask_and_leave(server, number, _at_text, stream=True)


async def _in_several(server: TrialServer, number: int) -> Answer:
    return await _ask_and_leave(server, number, _at_text, stream=True, n=2, temperature=1)


async def _in_prompt(server: TrialServer, number: int) -> Answer:
    return await _ask_and_leave(server, number, _at_head, stream=True, text=LONG)


async def _before_an_answer(server: TrialServer, number: int) -> Answer:
    """Of a whole answer, or of a place: after a moment, wherever it is then."""
    moment = random.Random(FIXED + number).uniform(0, WHOLE_LIMIT)
    asked = asyncio.create_task(_ask_and_leave(server, number, None))
    await asyncio.wait([asked], timeout=moment)
    asked.cancel()
    await asyncio.wait([asked])
    return Answer(None, "", b"", 0.0, None, 0.0) if asked.cancelled() else asked.result()


KINDS = (_in_stream, _in_prompt, _before_an_answer, _in_several, _in_stream)


async def _ask_and_leave(
    server: TrialServer, number: int, leave: Leave | None, text: str = "Count.", **more: object
) -> Answer:
    return await ask(server.url, chat(server, f"{number} {text}", TOKENS, **more), leave=leave)


async def _leave(server: TrialServer, count: int) -> list[Answer]:
    """So many clients, AT_ONCE of them at any time."""
    numbers, answers = iter(range(count)), []

    async def one_after_the_other() -> None:
        for number in numbers:
            answers.append(await KINDS[number % len(KINDS)](server, number))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_the_other())
    return answers


async def _all_places(server: TrialServer) -> int:
    """How many of as many requests as there are places get an answer when they come at once."""
    bodies = [chat(server, f"{number} Say hello.", 2) for number in range(SEATS + QUEUE)]
    answers = await asyncio.gather(*(ask(server.url, body) for body in bodies))
    return sum(answer.is_whole for answer in answers)
