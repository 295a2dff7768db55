"""Calls run in the order of their numbers, each once, whatever order and how often they arrive."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from server.errors import InvalidRequest, LongwaveError, SequenceConflict, ServerOverloaded
from server.training.calls import Call, OptimStep, Stepped
from server.training.futures import CallSequence, Future

GAP = 30.0


def call(rate: float = 1.0) -> OptimStep:
    return OptimStep(rate, 0.9, 0.95, 1e-12, 0.0, 0.0)


def sequence(max_pending: int = 8, max_results: int = 4) -> CallSequence:
    return CallSequence("train-1", max_pending=max_pending, max_results=max_results)


async def run_all(calls: CallSequence, count: int) -> list[int]:
    order = []
    for _ in range(count):
        future = await calls.next(GAP)
        order.append(future.seq_id)
        future.end(Stepped(1.0, 1))
        calls.pass_on(future)
    return order


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, GAP))


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_arrival_runs_in_the_order_of_the_numbers(seed: int) -> None:
    async def main() -> None:
        calls = sequence()
        running = asyncio.create_task(run_all(calls, 8))
        numbers = list(range(1, 9))
        random.Random(seed).shuffle(numbers)
        for number in numbers:
            calls.submit(number, call(number))
            await asyncio.sleep(0)  # the runner has its turn
        assert await running == list(range(1, 9))

    run(main())


def test_the_same_call_sent_again_is_the_same_future_at_every_moment() -> None:
    async def main() -> None:
        calls = sequence()
        first = calls.submit(1, call())
        assert calls.submit(1, call()) is first
        assert first.request_id == "train-1:1"
        assert await run_all(calls, 1) == [1]
        assert calls.submit(1, call()) is first
        assert first.outcome == Stepped(1.0, 1)
        assert first.call is None  # its data are not kept

    run(main())


@pytest.mark.parametrize("ended", [False, True])
def test_another_call_under_a_used_number_is_a_conflict(ended: bool) -> None:
    async def main() -> None:
        calls = sequence()
        calls.submit(1, call())
        if ended:
            await run_all(calls, 1)
        with pytest.raises(SequenceConflict, match="seq_id 1 was used for another call"):
            calls.submit(1, call(2.0))
        assert len(calls.pending) == (not ended)

    run(main())


def test_without_a_number_a_call_is_the_last_one() -> None:
    async def main() -> None:
        calls = sequence()
        calls.submit(2, call())
        assert [calls.submit(None, call()).seq_id for _ in range(2)] == [3, 4]
        calls.submit(1, call())
        assert await run_all(calls, 4) == [1, 2, 3, 4]
        assert calls.submit(None, call()).seq_id == 5

    run(main())


def test_who_lost_count_goes_on_with_the_lowest_number_that_no_call_has_had() -> None:
    """Not with that of the call that runs, or waits."""

    async def main() -> None:
        calls = sequence()
        assert calls.free_seq_id == 1
        calls.submit(1, call())
        assert (calls.next_seq_id, calls.free_seq_id) == (1, 2)
        calls.submit(3, call())
        assert calls.free_seq_id == 2
        calls.submit(calls.free_seq_id, call())
        assert calls.free_seq_id == 4
        assert await run_all(calls, 3) == [1, 2, 3]
        assert calls.free_seq_id == 4

    run(main())


def test_calls_behind_one_that_never_comes_fail_and_it_may_still_come() -> None:
    async def main() -> None:
        calls = sequence()
        late = calls.submit(2, call())
        running = asyncio.create_task(calls.next(0.05))
        await late.ended.wait()
        assert isinstance(late.outcome, InvalidRequest)
        assert late.outcome.message == "The call waited for the one with seq_id 1, which has not come within 0.05 s."
        first = calls.submit(1, call())
        assert await running is first
        calls.pass_on(first)
        first.end(Stepped(1.0, 1))
        third = calls.submit(3, call())
        assert await calls.next(GAP) is third  # 2 has ended

    run(main())


def test_the_time_for_a_gap_begins_with_the_gap_whatever_else_arrives() -> None:
    async def main() -> None:
        calls = sequence()
        first = calls.submit(2, call())
        running = asyncio.create_task(calls.next(0.2))
        number = 2
        while first.outcome is None:
            await asyncio.sleep(0.1)  # less than the time for a gap
            number += 1
            last = calls.submit(number, call())  # the queue ends at 8
        assert isinstance(first.outcome, InvalidRequest)
        await last.ended.wait()  # of another time: the gap before it was over
        running.cancel()

    run(main())


def test_calls_behind_a_gap_fail_at_once_when_no_call_comes_any_more_and_those_before_it_run() -> None:
    async def main() -> None:
        calls = sequence()
        sample = calls.submit(1, call())
        calls.pass_on(await calls.next(GAP))  # it runs beside the others
        before = [calls.submit(number, call()) for number in (2, 3)]
        behind = [calls.submit(number, call()) for number in (5, 7)]
        calls.close()
        for future in behind:
            assert isinstance(future.outcome, InvalidRequest)
            assert future.outcome.param == "seq_id"
            assert "waited for the one with seq_id 4, which has not come before the server was shut down" in str(
                future.outcome
            )
        assert calls.pending == [sample, *before]
        assert await calls.next(GAP) is before[0]

    run(main())


def test_a_gap_is_no_reason_to_fail_while_nothing_waits() -> None:
    async def main() -> None:
        calls = sequence()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.next(0.01), 0.1)

    run(main())


def test_what_runs_beside_the_queue_waits_for_nobody_and_does_not_fail_with_those_that_do() -> None:
    async def main() -> None:
        calls = sequence()
        sample = calls.submit(None, call())
        calls.pass_on(await calls.next(0.01))  # a long sample: it has not ended, and the next may run
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.next(0.01), 0.1)
        assert sample.outcome is None
        late = calls.submit(3, call())
        running = asyncio.create_task(calls.next(0.01))
        await late.ended.wait()
        running.cancel()
        assert isinstance(late.outcome, InvalidRequest)
        assert sample.outcome is None

    run(main())


def test_the_queue_is_bounded_in_length_and_in_reach() -> None:
    async def main() -> None:
        calls = sequence(max_pending=3)
        with pytest.raises(InvalidRequest, match="seq_id 4 is too far ahead: the next is 1"):
            calls.submit(4, call())
        running = [calls.submit(None, call()) for _ in range(3)]
        with pytest.raises(ServerOverloaded, match="3 calls of this model have not ended"):
            calls.submit(None, call())  # it would be number 4
        assert calls.submit(3, call()) is running[2]
        calls.pass_on(running[0])  # such as a sample: it has not ended, but the next may run
        with pytest.raises(ServerOverloaded, match="3 calls of this model have not ended"):
            calls.submit(4, call())
        running[0].end(Stepped(1.0, 1))
        assert calls.submit(4, call()).seq_id == 4

    run(main())


def test_results_are_forgotten_by_age_and_by_number_and_their_numbers_are_not_reused() -> None:
    async def main() -> None:
        calls = sequence(max_results=4)
        futures = [calls.submit(None, call()) for _ in range(6)]
        await run_all(calls, 6)
        waiting = calls.submit(None, call())
        calls.forget(before=0.0)
        assert [calls.find(number) is not None for number in range(1, 8)] == [
            False,
            False,
            True,
            True,
            True,
            True,
            True,
        ]
        with pytest.raises(SequenceConflict, match="its result is no longer kept; the next is 7"):
            calls.submit(1, call())
        calls.forget(before=futures[-1].ended_at + 1)
        assert [number for number in range(1, 8) if calls.find(number) is not None] == [waiting.seq_id]

    run(main())


def test_the_first_end_counts() -> None:
    async def main() -> None:
        future = Future("train-1", 1, call())
        future.end(LongwaveError("first"))
        future.end(Stepped(1.0, 1))
        assert isinstance(future.outcome, LongwaveError)

    run(main())


@pytest.mark.parametrize("other", [call(2.0), OptimStep(1.0, 0.9, 0.95, 1e-12, 0.0, 1.0)])
def test_calls_that_differ_in_anything_have_other_digests(other: Call) -> None:
    async def main() -> None:
        assert Future("train-1", 1, call()).digest == Future("train-1", 9, call()).digest
        assert Future("train-1", 1, call()).digest != Future("train-1", 1, other).digest

    run(main())
