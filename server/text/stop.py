"""Stop strings in a text that arrives in pieces: never leaked, never swallowed. Must not know tokens.

Knuth-Morris-Pratt, one automaton a stop string, so that the answer depends on the characters alone and never on where
the pieces end: the stop string that completes first wins, and of two completing together the longer one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str  # safe to show
    stopped: str | None = None  # the stop string found, if one was; nothing after it counts


class _Automaton:
    """How many of a pattern's characters the text seen so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._borders = _borders(pattern)

    def step(self, character: str) -> bool:
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.pattern[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.pattern)

    def go_on(self) -> None:
        """After a whole pattern that does not count."""
        self.matched = self._borders[-1]


class StopMatcher:
    """Text is held back exactly as long as it may be the start of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: one at least."""
        self._automata = [_Automaton(pattern) for pattern in sorted(set(stop), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Without `may_stop`, a stop string that ends in `text` is text; one that ends later is found."""
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            completed = [automaton for automaton in self._automata if automaton.step(character)]
            if not may_stop:
                for automaton in completed:
                    automaton.go_on()
            elif completed:
                self._held = ""
                return StopResult(buffer[: end - len(completed[0].pattern)], stopped=completed[0].pattern)
        safe = len(buffer) - max(automaton.matched for automaton in self._automata)
        self._held = buffer[safe:]
        return StopResult(buffer[:safe])

    def feed_if_it_stops(self, text: str) -> StopResult:
        """As `feed` when a stop string ends in `text`; otherwise no text at all, and nothing was fed."""
        held, matched = self._held, [automaton.matched for automaton in self._automata]
        result = self.feed(text)
        if result.stopped is not None:
            return result
        self._held = held
        for automaton, number in zip(self._automata, matched, strict=True):
            automaton.matched = number
        return StopResult("")

    def finish(self) -> str:
        """The text ended without a stop string: what was held back is text."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=128)  # the choices of one request have the same stop strings, and there may be hundreds of choices
def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length - 1]
        if pattern[at] == pattern[length]:
            length += 1
        borders[at] = length
    return tuple(borders)
