"""Times calls on a GPU with CUDA events: warm-up, an L2 flush before each call, rotating inputs, contenders in turn."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]
_FLUSH_BYTES = 256 * 1024 * 1024  # several times any L2; writing it also hides the launch latency of what follows
_MIN_REPEATS, _MAX_REPEATS = 3, 300  # in a round; the flush takes longer than a short call


@dataclass
class Stopwatch:
    """Milliseconds of a call. `calls` are the same work on different inputs; they are used in turn."""

    device: torch.device
    flush: bool = True
    warm_up_ms: float = 5.0
    repeat_ms: float = 40.0
    _scratch: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._scratch = torch.empty(_FLUSH_BYTES if self.flush else 0, dtype=torch.int8, device=self.device)

    def times(self, calls: Sequence[Call]) -> list[float]:
        calls[0]()
        guess = max(self._events(calls, 2)[-1], 1e-3)
        self._events(calls, repeats(self.warm_up_ms, guess, fewest=0))
        return self._events(calls, repeats(self.repeat_ms, guess))

    def _events(self, calls: Sequence[Call], count: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for i, (begin, end) in enumerate(marks):
            if self.flush:
                self._scratch.zero_()
            begin.record()
            calls[i % len(calls)]()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in marks]


def repeats(budget_ms: float, call_ms: float, fewest: int = _MIN_REPEATS) -> int:
    return max(fewest, min(_MAX_REPEATS, int(budget_ms / call_ms)))


def alternate(
    contenders: Mapping[str, Sequence[Call]], times: Callable[[Sequence[Call]], list[float]], rounds: int
) -> dict[str, float | Exception]:
    """The median of all times of each contender; every round times each once, so that drift meets all alike.

    A contender that raises leaves the race with its exception as the result.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    failed: dict[str, Exception] = {}
    for _ in range(rounds):
        for name, calls in contenders.items():
            if name in failed:
                continue
            try:
                samples[name] += times(calls)
            except Exception as error:  # the reason is recorded beside the contender's name
                failed[name] = error
    return {name: failed.get(name) or statistics.median(samples[name]) for name in contenders}


def copy_bandwidth(stopwatch: Stopwatch, num_bytes: int = 1 << 31) -> float:
    """TB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(0, 127, (num_bytes,), dtype=torch.int8, device=stopwatch.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(stopwatch.times([lambda: target.copy_(source)])) / 1e9
