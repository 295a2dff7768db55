"""Sends a workload when it is to be sent, and waits for its end: open and closed loop. Knows no HTTP, no figures."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from server.bench.outcome import TURN_BEFORE, Outcome
from server.bench.workload import Conversation, Turn

#: (what to ask, when it was to be sent) -> what became of it; never raises for what a server does.
Send = Callable[[Turn, float], Awaitable[Outcome]]


async def run_load(
    conversations: Sequence[Conversation],
    send_times: Sequence[float],
    send: Send,
    *,
    max_concurrency: int | None,
    ended: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Every turn's outcome, conversation by conversation, and the seconds from the first sending to the last end.

    Open loop: each conversation begins at its time, whatever the server does. With `max_concurrency` it waits for a
    place, and with all times 0 that is a closed loop. Its latencies count from the real sending; how long it waited is
    the outcome's `sent - planned`. A later turn is sent when the answer before it has ended.
    """
    places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    begin = time.perf_counter()

    async def hold(conversation: Conversation, offset: float) -> list[Outcome]:
        if (wait := begin + offset - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        outcomes: list[Outcome] = []
        async with places:
            planned = begin + offset
            for turn in conversation:
                if outcomes and not outcomes[-1].completed:
                    outcome = Outcome(turn.prompt_tokens, planned).fail(TURN_BEFORE)
                else:
                    outcome = await send(turn, planned)
                outcomes.append(outcome)
                ended(outcome)
                planned = time.perf_counter()
        return outcomes

    pairs = zip(conversations, send_times, strict=True)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hold(conversation, offset)) for conversation, offset in pairs]
    return [outcome for task in tasks for outcome in task.result()], time.perf_counter() - begin
