"""How often something has died of late, and whether that is too often to start it again. Knows no process."""

from collections import deque

MAX_DEATHS = 3  # within DEATH_WINDOW seconds; one more and the engine stays dead
DEATH_WINDOW = 300.0


class Deaths:
    """More than `most` within `window` seconds are too many."""

    def __init__(self, most: int, window: float) -> None:
        self.num = 0
        self._most = most
        self._window = window
        self._recent: deque[float] = deque()

    def add(self, now: float) -> bool:
        """Another one at `now`, in seconds that never go back. Are they too many?"""
        self.num += 1
        self._recent.append(now)
        while self._recent[0] < now - self._window:
            self._recent.popleft()
        return len(self._recent) > self._most

    def __str__(self) -> str:
        return f"{len(self._recent)} times in {self._window:.0f} s"
