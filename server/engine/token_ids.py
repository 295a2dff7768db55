"""Token ids in a row, four bytes each: how prompts cross the process border and how requests keep them. A list would
take 36 bytes for each, and every full garbage collection would walk through it. Knows no vocabulary."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

_new: Any = array.__new__
_item: Any = array.__getitem__


class TokenIds(array):  # type: ignore[type-arg]  # array[int]: from Python 3.12 on
    """A sequence that grows at its end, as lists do; slices are copies. NumPy reads it as it is, without a copy."""

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] | bytes = ()) -> "TokenIds":
        """`bytes` are unsigned integers of 32 bits, as tobytes() gives them. Raises OverflowError for ids that are
        none, TypeError for what is no id, ValueError for bytes of another length."""
        return _new(cls, "I", ids)

    @overload
    def __getitem__(self, where: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, where: slice, /) -> "TokenIds": ...
    def __getitem__(self, where: SupportsIndex | slice, /) -> "int | TokenIds":
        found = _item(self, where)
        return _new(TokenIds, "I", found) if where.__class__ is slice else found

    def __add__(self, others: Sequence[int], /) -> "TokenIds":
        both = _new(TokenIds, "I", self)
        if others:
            both.extend(others)
        return both

    def largest(self) -> int:
        """Raises ValueError where there are no ids."""
        return int(np.frombuffer(self, np.uint32).max())
