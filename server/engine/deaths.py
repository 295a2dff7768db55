"""How often something has died of late, and whether that is too often to start it again. Knows no process."""

from collections import deque

MAX_DEATHS = 3  # within DEATH_WINDOW seconds, or in a row; one more and the engine stays dead
DEATH_WINDOW = 300.0


class Deaths:
    """More than `most` are too many, within `window` seconds, or with no recovery between them: what takes long to die
    in its start would be started for ever."""

    def __init__(self, most: int, window: float) -> None:
        self.num = 0
        self._most = most
        self._window = window
        self._recent: deque[float] = deque()
        self._in_a_row = 0

    def add(self, now: float) -> bool:
        """Another one at `now`, in seconds that never go back. Are they too many?"""
        self.num += 1
        self._in_a_row += 1
        self._recent.append(now)
        while self._recent[0] < now - self._window:
            self._recent.popleft()
        return max(len(self._recent), self._in_a_row) > self._most

    def recover(self) -> None:
        """It has come up."""
        self._in_a_row = 0

    def __str__(self) -> str:
        if self._in_a_row > len(self._recent):
            return f"{self._in_a_row} times without being ready between"
        return f"{len(self._recent)} times in {self._window:.0f} s"
