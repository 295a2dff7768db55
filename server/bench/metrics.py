"""From outcomes to figures: percentiles, throughput, goodput, and what happened when. Pure; names are vLLM's."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.bench.outcome import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, linearly: numpy's default. `values` ascending. NaN of nothing."""
    if not values:
        return math.nan
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds, ascending."""

    values: tuple[float, ...]

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Distribution":
        return cls(tuple(sorted(1e3 * value for value in seconds)))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        return statistics.pstdev(self.values) if self.values else math.nan

    def percentile(self, percent: float) -> float:
        return percentile(self.values, percent)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that a report says. Throughputs are a second of `duration`, and count completed requests only."""

    duration: float
    completed: int
    failures: Mapping[str, int]
    failure_details: Mapping[str, str]  # an example of each
    total_input: int
    total_output: int
    request_goodput: float | None
    max_output_tokens_per_s: int
    max_concurrent_requests: int
    send_delay: Distribution  # between the planned and the real moment of sending
    inexact_chunks: int  # requests whose ITL is by chunks, since tokens could not be told apart
    distributions: Mapping[str, Distribution]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def request_throughput(self) -> float:
        return self._rate(self.completed)

    @property
    def output_throughput(self) -> float:
        return self._rate(self.total_output)

    @property
    def total_token_throughput(self) -> float:
        return self._rate(self.total_input + self.total_output)

    def _rate(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def measure(outcomes: Sequence[Outcome], duration: float, goodput: Mapping[str, float]) -> Measurement:
    """`goodput`: limits in milliseconds by metric; without any there is no goodput."""
    done = [outcome for outcome in outcomes if outcome.completed]
    failed = [outcome for outcome in outcomes if not outcome.completed]
    good = sum(is_good(outcome, goodput) for outcome in done)
    seconds = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.tpot is not None],
        "itl": [gap for outcome in done for gap in outcome.itls],
        "e2el": [outcome.e2el for outcome in done],
    }
    return Measurement(
        duration=duration,
        completed=len(done),
        failures=Counter(outcome.failure or "" for outcome in failed),
        failure_details={outcome.failure or "": outcome.detail for outcome in reversed(failed)},
        total_input=sum(outcome.prompt_tokens for outcome in done),
        total_output=sum(outcome.output_tokens for outcome in done),
        request_goodput=good / duration if goodput and duration > 0 else None,
        max_output_tokens_per_s=max((count for _, count in tokens_per_second(done)), default=0),
        max_concurrent_requests=max((count for _, count in concurrency(done)), default=0),
        send_delay=Distribution.of_seconds([outcome.sent - outcome.planned for outcome in outcomes if outcome.sent]),
        inexact_chunks=sum(not outcome.chunks_are_tokens for outcome in done),
        distributions={name: Distribution.of_seconds(values) for name, values in seconds.items()},
    )


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether it kept every limit (milliseconds). An answer of one token has no TPOT, and keeps any limit of it."""
    found = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.e2el}
    return all(1e3 * (found[name] or 0.0) <= limit for name, limit in limits.items())


def tokens_per_second(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Output tokens of each whole second since the first request was sent."""
    chunks = [chunk for outcome in outcomes for chunk in outcome.chunks]
    if not chunks:
        return []
    begin = min(outcome.sent for outcome in outcomes)
    counts = Counter[int]()
    for moment, tokens in chunks:
        counts[int(moment - begin)] += tokens
    return [(float(second), counts[second]) for second in range(max(counts) + 1)]


def concurrency(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(seconds since the first was sent, requests that run from then on). One ends before another begins at once."""
    if not outcomes:
        return []
    begin = min(outcome.sent for outcome in outcomes)
    changes = sorted([(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes])
    steps, running = [], 0
    for moment, change in changes:
        running += change
        steps.append((moment - begin, running))
    return steps


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> milliseconds by metric. Raises ValueError."""
    limits = {}
    for pair in " ".join(pairs).split():
        name, _, number = pair.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_METRICS or not limit >= 0:
            raise ValueError(f"{pair!r} is not {' or '.join(GOODPUT_METRICS)}, a colon and milliseconds")
        limits[name] = limit
    return limits
