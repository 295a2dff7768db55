"""How fast files are read, measured while any are. Pure arithmetic: no files, no threads, and a clock's readings come
from the caller."""

FORGOTTEN = 0.02  # with each further read, of all before: some fifty count, as the next files may lie elsewhere
MEASURED_FOR = 60.0  # seconds that a measurement is believed: then a slow disk is tried again


class ReadSpeed:
    """Of reads that run beside each other: what counts is the time in which there was any."""

    def __init__(self, sample: int) -> None:
        """`sample`: reads before the speed is known; so many run at once, and fewer would seem slower."""
        self._sample = sample
        self._num_reads = 0
        self._bytes = self._seconds = 0.0
        self._num_running = 0
        self._counted_until = 0.0
        self._last_end = float("-inf")

    def begin(self, now: float) -> None:
        """A read is queued, at `now` in seconds."""
        if self._num_running == 0:
            self._counted_until = now
            if self._is_old(now):
                self._num_reads = 0
                self._bytes = self._seconds = 0.0
        self._num_running += 1

    def end(self, num_bytes: int, now: float) -> None:
        """One has ended at `now`, with so many bytes: 0 if it failed."""
        self._num_running -= 1
        self._num_reads += 1
        self._last_end = max(self._last_end, now)
        self._bytes = (1 - FORGOTTEN) * self._bytes + num_bytes
        self._seconds = (1 - FORGOTTEN) * self._seconds + max(0.0, now - self._counted_until)
        self._counted_until = max(self._counted_until, now)

    def seconds(self, num_bytes: int, now: float) -> float | None:
        """What reading so many takes; infinity where all reads failed. None: not known, or no more."""
        if self._num_reads < self._sample or self._is_old(now):
            return None
        return num_bytes * self._seconds / self._bytes if self._bytes else float("inf")

    def missing(self, now: float) -> int:
        """Reads that must begin for the speed to be known, those that run left out."""
        is_begun = self._num_running > 0 or not self._is_old(now)
        return max(0, self._sample - self._num_reads - self._num_running) if is_begun else self._sample

    def _is_old(self, now: float) -> bool:
        return now - self._last_end > MEASURED_FOR
