"""Open and closed loop, on sends that take as long as a test says."""

import asyncio

from server.bench.load import run_load
from server.bench.outcome import TURN_BEFORE, UNREACHABLE, Outcome
from server.bench.workload import Turn


class Sends:
    """Every request waits until as many as `gather` are open, then all of these end."""

    def __init__(self, gather: int = 1, failing: frozenset[int] = frozenset()) -> None:
        self.gather, self.failing = gather, failing
        self.sent: list[int] = []
        self.open = self.most_open = 0
        self.full = asyncio.Condition()

    async def send(self, turn: Turn, planned: float) -> Outcome:
        number = turn.prompt_tokens
        self.sent.append(number)
        async with self.full:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            if self.open >= self.gather:
                self.full.notify_all()
            else:
                await self.full.wait()
            self.open -= 1
        outcome = Outcome(number, planned, asyncio.get_running_loop().time())
        return outcome.fail(UNREACHABLE) if number in self.failing else outcome


def turns(*numbers: int) -> tuple[Turn, ...]:
    return tuple(Turn([1], number, 1) for number in numbers)


def test_everything_at_once_without_a_limit() -> None:
    async def run() -> None:
        sends = Sends(gather=5)
        conversations = [turns(number) for number in range(5)]
        outcomes, _ = await run_load(conversations, [0.0] * 5, sends.send, max_concurrency=None, ended=lambda _: None)
        assert sends.most_open == 5
        assert [outcome.prompt_tokens for outcome in outcomes] == [0, 1, 2, 3, 4]

    asyncio.run(run())


def test_a_closed_loop_never_has_more_than_its_places() -> None:
    async def run() -> None:
        sends = Sends(gather=2)
        seen: list[Outcome] = []
        conversations = [turns(number) for number in range(6)]
        await run_load(conversations, [0.0] * 6, sends.send, max_concurrency=2, ended=seen.append)
        assert sends.most_open == 2
        assert len(seen) == 6

    asyncio.run(run())


def test_an_open_loop_sends_at_its_times_and_keeps_the_plan() -> None:
    async def run() -> None:
        sends = Sends()
        times = [0.0, 0.05, 0.1]
        conversations = [turns(number) for number in range(3)]
        outcomes, seconds = await run_load(conversations, times, sends.send, max_concurrency=None, ended=lambda _: None)
        assert sends.sent == [0, 1, 2]
        assert seconds >= 0.1
        plans = [outcome.planned - outcomes[0].planned for outcome in outcomes]
        assert [round(plan, 6) for plan in plans] == times

    asyncio.run(run())


def test_turns_of_a_conversation_follow_each_other_and_a_failure_ends_it() -> None:
    async def run() -> None:
        sends = Sends(failing=frozenset({11}))
        conversations = [turns(10, 11, 12), turns(20, 21)]
        outcomes, _ = await run_load(conversations, [0.0, 0.0], sends.send, max_concurrency=1, ended=lambda _: None)
        assert sends.sent == [10, 11, 20, 21]
        assert [outcome.failure for outcome in outcomes] == [None, UNREACHABLE, TURN_BEFORE, None, None]

    asyncio.run(run())
