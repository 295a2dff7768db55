"""What is asked and when: exact lengths, shared beginnings, and processes that have the rate they are given."""

import math
import random
import statistics
from itertools import pairwise

import pytest

from server.bench.arrivals import send_times
from server.bench.lengths import Lengths
from server.bench.workload import RandomPrompts, SharedDocuments

VOCABULARY = range(1000, 10_000)


def gaps(process: str, burstiness: float = 1.0, count: int = 20_000) -> list[float]:
    times = send_times(count, 8.0, process, burstiness, random.Random(0))  # type: ignore[arg-type]
    assert times == sorted(times)
    assert times[0] == 0.0
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("process", "burstiness", "variation"),
    [("constant", 1.0, 0.0), ("poisson", 1.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_a_process_has_its_rate_and_its_burstiness(process: str, burstiness: float, variation: float) -> None:
    found = gaps(process, burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, abs=0.08)  # 1 / sqrt(burstiness)


def test_an_infinite_rate_is_everything_at_once() -> None:
    assert send_times(3, math.inf, "gamma", 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_what_is_no_process_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        send_times(2, rate, "gamma", burstiness, random.Random(0))


def test_fixed_and_uniform_lengths() -> None:
    generator = random.Random(0)
    assert {Lengths(7).draw(generator) for _ in range(50)} == {7}
    drawn = [Lengths(100, range_ratio=0.2).draw(generator) for _ in range(5000)]
    assert (min(drawn), max(drawn)) == (80, 120)
    assert statistics.fmean(drawn) == pytest.approx(100, rel=0.02)


def test_long_tailed_lengths_keep_their_median_and_their_limit() -> None:
    generator = random.Random(0)
    lengths = Lengths(1000, sigma=1.0, longest=20_000)
    drawn = [lengths.draw(generator) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(1000, rel=0.05)
    assert statistics.fmean(drawn) > 1400  # exp(1/2) times the median, but for the cut
    assert max(drawn) == 20_000
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"mean": 0},
        {"mean": 5, "range_ratio": 1.0},
        {"mean": 5, "sigma": -1.0},
        {"mean": 5, "sigma": 10.5},
        {"mean": 5, "sigma": math.inf},
        {"mean": 5, "sigma": math.nan},
        {"mean": 5, "longest": 0},
        {"mean": 5, "sigma": 1.0, "range_ratio": 0.1},
    ],
)
def test_what_is_no_length_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Lengths(**fields)  # type: ignore[arg-type]


def test_prompts_have_their_lengths_and_are_the_same_for_a_seed() -> None:
    workload = RandomPrompts(20, Lengths(50, range_ratio=0.5), Lengths(9), prefix_len=12)
    first, again = (workload.conversations(VOCABULARY, random.Random(3)) for _ in range(2))
    other = workload.conversations(VOCABULARY, random.Random(4))
    assert first == again
    assert first != other
    for (turn,) in first:
        assert turn.prompt_tokens == len(turn.prompt)
        assert 12 + 25 <= turn.prompt_tokens <= 12 + 75
        assert turn.prompt[:12] == first[0][0].prompt[:12]
        assert turn.max_tokens == 9
    assert len({tuple(turn.prompt[12:]) for (turn,) in first}) == 20


def test_a_later_turn_begins_with_everything_before_it() -> None:
    (turns,) = RandomPrompts(1, Lengths(20), Lengths(5), num_turns=3).conversations(VOCABULARY, random.Random(0))
    assert [turn.prompt_tokens for turn in turns] == [20, 45, 70]  # an answer of 5 and a question of 20 more each time
    for before, after in pairwise(turns):
        assert after.prompt[: before.prompt_tokens] == before.prompt


def test_questions_share_documents_in_turn() -> None:
    workload = SharedDocuments(6, 2, 30, Lengths(4), Lengths(1))
    prompts = [turn.prompt for (turn,) in workload.conversations(VOCABULARY, random.Random(0))]
    assert all(len(prompt) == 34 for prompt in prompts)
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert prompts[0][:30] == prompts[2][:30] != prompts[1][:30]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6
