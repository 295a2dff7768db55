"""Where a text repeats itself: the tokens after the latest earlier occurrence of its last few. Knows token ids only.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding), with an index: what is there at the first look is sorted
once, later tokens enter a dictionary, so a look costs the same however long the text is."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

_FACTOR = 0x9E37_79B9_7F4A_7C15
_WORD = (1 << 64) - 1
_POSITION = (1 << 18) - 1  # lower bits of a sorted word; the others are a key's
MOST_SORTED = _POSITION - 1  # tokens: of a longer text only the end is looked at
_CANDIDATES = 16  # occurrences compared of each kind, the latest first


class Match(NamedTuple):
    end: int  # index of the token after the occurrence
    length: int  # tokens that are equal, at most `longest`


class PromptLookup:
    def __init__(self, token_ids: Sequence[int], *, shortest: int, longest: int) -> None:
        """`token_ids` is looked at whenever find() is called: it may have grown."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"matches of {shortest} to {longest} tokens: 1 <= shortest <= longest")
        self._tokens = token_ids
        self._shortest = shortest
        self._longest = longest
        self._start = 0  # of what is sorted
        self._sorted: Sequence[int] = ()  # upper bits of a key, then the position of its end, from the start
        self._later: dict[int, list[int]] = {}  # key -> ends of its occurrences
        self._num_indexed = 0  # occurrences that end at or before it are known

    def find(self) -> Match | None:
        """The longest earlier occurrence of the text's end, the latest of equally long ones."""
        size = len(self._tokens)
        if size <= self._shortest:
            return None
        self._index(size - 1)
        best: Match | None = None
        text_end = list(self._tokens[-self._longest :])
        for end in self._occurrences(_key(text_end[-self._shortest :])):
            length = _common_suffix(list(self._tokens[max(0, end - self._longest) : end]), text_end)
            if length >= self._shortest and (best is None or length > best.length):
                best = Match(end, length)
                if length == self._longest:
                    break
        return best

    def continuation(self, match: Match, count: int) -> list[int]:
        """`count` tokens after the occurrence; where the text ends, it is taken to go on repeating itself."""
        tokens = list(self._tokens[match.end : match.end + count])
        period = len(self._tokens) - match.end
        while len(tokens) < count:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    def _index(self, end: int) -> None:
        """Takes in the occurrences that end up to `end`."""
        if self._num_indexed == 0:
            self._sort(end)
        else:
            new = list(self._tokens[self._num_indexed + 1 - self._shortest : end])
            for start, position in enumerate(range(self._num_indexed + 1, end + 1)):
                self._later.setdefault(_key(new[start : start + self._shortest]), []).append(position)
        self._num_indexed = end

    def _sort(self, end: int) -> None:
        self._start = max(0, end - MOST_SORTED)
        ids = np.frombuffer(array("I", self._tokens[self._start : end]), np.uint32).astype(np.uint64)
        count = len(ids) - self._shortest + 1
        keys = np.zeros(max(count, 0), np.uint64)
        for offset in range(self._shortest):
            keys = (keys + ids[offset : offset + count]) * np.uint64(_FACTOR)  # wraps, as meant
        keys &= np.uint64(_WORD ^ _POSITION)
        keys |= np.arange(self._shortest, self._shortest + count, dtype=np.uint64)
        keys.sort()
        self._sorted = keys.data  # as Python's numbers: a look for one is faster than NumPy's

    def _occurrences(self, key: int) -> Iterator[int]:
        """Ends of what may be occurrences (a key may be another's too), the latest first."""
        yield from islice(reversed(self._later.get(key, ())), _CANDIDATES)
        first = key & (_WORD ^ _POSITION)
        end = bisect_right(self._sorted, first | _POSITION)
        for word in reversed(self._sorted[max(0, end - _CANDIDATES) : end]):
            if word < first:
                return
            yield (word & _POSITION) + self._start


def _key(tokens: Iterable[int]) -> int:
    key = 0
    for token in tokens:
        key = (key + token) * _FACTOR & _WORD
    return key


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        length += 1
    return length
