"""How long the engine's starts take: by that the next one is judged, and the log tells of one that lasts. Knows no
process."""

import math
import time

from models.stages import Stages

START_TIMES = 5.0  # what the start before it took, so many times: as long may a start be silent,
LEAST_START = 900.0  # or so many seconds, if more: one stage may read all weights from a cold disk, or compile kernels


class Starts:
    """One after the other. Of the first one nobody knows how long it takes: it may download for an hour."""

    def __init__(self, least: float = LEAST_START) -> None:
        self.seconds = 0.0  # that the last one took which came to its end; 0: none has
        self.stages: dict[str, float] = {}  # that have ended of this one, in seconds
        self._least = least
        self._began = 0.0

    def begin(self) -> None:
        """What is not ended before is no part of this one."""
        self._began = time.monotonic()
        self.stages = {}

    def end(self) -> None:
        """It came up."""
        self.seconds = time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """If it takes as long as the last one."""
        return max(0.0, self._began + self.seconds - time.monotonic())

    @property
    def max_silence(self) -> float:
        """Seconds, from one stage's end to the next one's."""
        return max(self._least, START_TIMES * self.seconds) if self.seconds else math.inf

    def __str__(self) -> str:
        ended = Stages()
        ended.seconds = self.stages
        done = f"of them {ended}" if self.stages else "no stage of it has ended"
        return f"{time.monotonic() - self._began:.0f} s so far, {done}"
