"""How many threads torch computes with, on a CPU that others use too. Knows no model.

A parallel product waits for its slowest thread, and a step has hundreds: where another process takes a core for a few
milliseconds at a time, each of them can cost that long, and a token a second instead of thirty milliseconds. Fewer
threads, each with a core of its own, wait for nobody. The kernel counts how long a thread stood ready without a core.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_TASKS = Path("/proc/self/task")
LOOK_SECONDS = 0.2  # between two looks
BREAK_SECONDS = 1.0  # between two steps: what was counted meanwhile says nothing of them
CROWDED, CALM = 0.2, 0.05  # of the time: how long the threads, all together, stood without a core
FIRST_REST, LONGEST_REST = 1.0, 60.0  # seconds before one more thread is tried, twice as long after each failure


def waited_seconds(tasks: Path = _TASKS) -> float | None:
    """How long this process's threads have stood ready without a core, all together; None where nobody counts it."""
    total = 0
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except FileNotFoundError:
            if task.is_dir():
                return None
        except (OSError, IndexError, ValueError):  # a thread that has just ended, or a kernel without these numbers
            continue
    return total / 1e9


class CpuThreads:
    """Between 1 and `most` of them, as many as have cores. Where two threads wait for each other's cores, a step of
    milliseconds takes seconds, so one looks between its layers, too."""

    def __init__(
        self,
        most: int,
        *,
        waited: Callable[[], float | None] = waited_seconds,
        clock: Callable[[], float] = time.monotonic,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.count = most
        self._most = most
        self._waited = waited
        self._clock = clock
        self._set_threads = set_threads
        self._rest = FIRST_REST
        self._next_try = 0.0
        self._last_end = float("-inf")  # of a step
        self._last_look = 0.0, 0.0  # when, and what had been waited by then

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step, in the thread that runs it."""
        now = self._clock()
        if self._most > 1 and now - self._last_end >= BREAK_SECONDS:
            self._begin(now)
        try:
            yield
        finally:
            self.look()
            self._last_end = self._clock()

    def look(self) -> None:
        """Within a step, as often as one likes: takes fewer threads where they stood without a core, and tries one more
        from time to time."""
        if self._most == 1:
            return
        now, (then, before) = self._clock(), self._last_look
        if now - then < LOOK_SECONDS:
            return
        self._begin(now)
        self._judge((self._last_look[1] - before) / (now - then), now)

    def _begin(self, now: float) -> None:
        waited = self._waited()
        if waited is None:
            self._most = 1  # there is nothing to go by
        else:
            self._last_look = now, waited

    def _judge(self, share: float, now: float) -> None:
        """`share`: cores that were missing."""
        if share > CROWDED and self.count > 1:
            self._use(max(1, self.count - max(1, round(share))))
            self._next_try, self._rest = now + self._rest, min(2 * self._rest, LONGEST_REST)
        elif share < CALM and now >= self._next_try:
            if self.count < self._most:
                self._use(self.count + 1)
                self._next_try = now + LOOK_SECONDS
            else:
                self._rest = FIRST_REST

    def _use(self, count: int) -> None:
        logger.info("this CPU has room for %d of %d threads", count, self._most)
        self.count = count
        self._set_threads(count)
