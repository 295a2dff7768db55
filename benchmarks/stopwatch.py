"""Times calls on a GPU with CUDA events: warm-up, an L2 flush before each call, rotating inputs, contenders in turn.

The device waits while calls are queued, so that the host's time to launch them is in no time. The L2 is flushed by
reading: lines that a flush had written would be written back while the call runs.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter

import torch

Call = Callable[[], object]
FLUSHED_BY = "reading"  # as results name it; those without a name are of a flush that wrote
ORDERED_BY = "neighbours"  # as results name `turns`; those without a name had one order in every round
_FLUSH_BYTES = 256 * 1024 * 1024  # several times any L2
_QUEUED = 64  # calls queued at a time: the driver holds about a thousand launches
_TRIES = 3
_LONGEST_WAIT = 0.1  # seconds
_CYCLES_PER_SECOND = 2e9  # at a GPU's fastest: slower ones wait longer
_MIN_REPEATS, _MAX_REPEATS = 3, 300  # in a round; the flush takes longer than a short call


@dataclass
class Stopwatch:
    """Milliseconds of a call. `calls` are the same work on different inputs; they are used in turn."""

    device: torch.device
    flush: bool = True
    warm_up_ms: float = 5.0
    repeat_ms: float = 40.0
    _scratch: torch.Tensor = field(init=False, repr=False)
    _launch: float = field(init=False, repr=False, default=0.0)  # seconds that queueing a call takes, or more

    def __post_init__(self) -> None:
        self._scratch = torch.zeros(_FLUSH_BYTES // 4 if self.flush else 0, dtype=torch.float32, device=self.device)

    def times(self, calls: Sequence[Call]) -> list[float]:
        self._launch = 0.0
        calls[0]()
        guess = max(self._events(calls, 2)[-1], 1e-3)
        self._events(calls, repeats(self.warm_up_ms, guess, fewest=0))
        return self._events(calls, repeats(self.repeat_ms, guess))

    def _events(self, calls: Sequence[Call], count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            turn = [calls[i % len(calls)] for i in range(len(times), min(len(times) + _QUEUED, count))]
            times += self._queued(turn)
        return times

    def _queued(self, calls: Sequence[Call]) -> list[float]:
        """Once more with a longer wait where the device was done waiting before all calls were queued."""
        for _ in range(_TRIES):
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
            waited = torch.cuda.Event()
            wait = min(self._launch * len(calls), _LONGEST_WAIT)
            torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
            waited.record()
            started = perf_counter()
            for call, (begin, end) in zip(calls, marks, strict=True):
                if self.flush:
                    self._scratch.sum()
                begin.record()
                call()
                end.record()
            took, late = perf_counter() - started, waited.query()
            torch.cuda.synchronize(self.device)
            if not late or wait == _LONGEST_WAIT:
                break
            self._launch = max(1.5 * took / len(calls), 2 * self._launch)
        return [begin.elapsed_time(end) for begin, end in marks]


def repeats(budget_ms: float, call_ms: float, fewest: int = _MIN_REPEATS) -> int:
    return max(fewest, min(_MAX_REPEATS, int(budget_ms / call_ms)))


def alternate(
    contenders: Mapping[str, Sequence[Call]], times: Callable[[Sequence[Call]], list[float]], rounds: int
) -> dict[str, float | Exception]:
    """The median of all times of each contender. Every round times each once, so that drift meets all alike, in the
    orders of `turns`, as whoever runs after a hot kernel has a slower clock at the card's power limit.

    A contender that raises leaves the race with its exception as the result.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    failed: dict[str, Exception] = {}
    for _, order in zip(range(rounds), cycle(turns(list(contenders))), strict=False):
        for name in order:
            if name in failed:
                continue
            try:
                samples[name] += times(contenders[name])
            except Exception as error:  # the reason is recorded beside the contender's name
                failed[name] = error
    return {name: failed.get(name) or statistics.median(samples[name]) for name in contenders}


def alternate_all(
    contenders: Mapping[str, Sequence[Call]], times: Callable[[Sequence[Call]], list[float]], rounds: int
) -> dict[str, float]:
    """As `alternate`, of contenders that have all to run: raises ArithmeticError for the first that did not."""
    medians: dict[str, float] = {}
    for name, result in alternate(contenders, times, rounds).items():
        if isinstance(result, Exception):
            raise ArithmeticError(f"{name}: {type(result).__name__}: {result}") from result
        medians[name] = result
    return medians


def turns(names: Sequence[str]) -> list[list[str]]:
    """Orders in which each name has each place, and comes right behind each other name, equally often.

    An even number of names needs as many orders, an odd one twice as many. E. J. Williams, "Experimental designs
    balanced for the estimation of residual effects of treatments", Australian Journal of Scientific Research A2, 1949.
    """
    count = len(names)
    zigzag = [-(place // 2) if place % 2 == 0 else place // 2 + 1 for place in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[names[(first + step) % count] for step in zigzag] for first in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def copy_bandwidth(stopwatch: Stopwatch, num_bytes: int = 1 << 31) -> float:
    """TB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(0, 127, (num_bytes,), dtype=torch.int8, device=stopwatch.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(stopwatch.times([lambda: target.copy_(source)])) / 1e9
