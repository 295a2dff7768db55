"""What a transformers mask closure means, read from its parts and never evaluated.

Knows the closures of `transformers.masking_utils`; knows no tensor layout of ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attention_backend.problem import UNBOUNDED

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """One interval of keys per query, in the sense of `AttentionArgs`, plus what splits a row into sequences."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    chunk: int = 0
    chunk_start: Tensor | None = None  # [batch]: the first token of each row, where its chunks start
    sequence_ids: Tensor | None = None  # [batch, seqlen]: packed rows; tokens of different ids never meet
    positions: Tensor | None = None  # [batch, seqlen]: positions inside each packed sequence


Cells = Mapping[str, Any]  # the free variables of a closure, by name


def classify(mask_function: MaskFunction) -> MaskRule | None:
    """The rule that `mask_function` stands for, or None when it is not one of the known patterns."""
    code = getattr(mask_function, "__code__", None)
    if code is _CAUSAL_CODE:
        return MaskRule(right=0)
    if code is _BIDIRECTIONAL_CODE:
        return MaskRule()
    return _classify_closure(mask_function)


@torch.compiler.disable  # the compiler cannot look into a closure it has just traced: a graph break, not an error
def _classify_closure(mask_function: MaskFunction) -> MaskRule | None:
    reader = _READERS.get(getattr(mask_function, "__code__", None))
    return None if reader is None else reader(_cells(mask_function))


def describe(mask_function: MaskFunction) -> str:
    """A name a person can search for: `and_masks(sliding_window_overlay, causal_mask_function)`."""
    name = getattr(mask_function, "__qualname__", type(mask_function).__qualname__).split(".<locals>")[0]
    module = getattr(mask_function, "__module__", None)
    if module != masking_utils.__name__:
        return f"{module}.{name}"
    cells = _cells(mask_function)
    parts = [describe(part) for part in cells.get("mask_functions", [cells.get("mask_function")]) if part is not None]
    return f"{name}({', '.join(parts)})" if parts else name


def _cells(function: MaskFunction) -> Cells:
    closure = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, closure, strict=True)}


def _remapped(cells: Cells) -> MaskRule | None:
    inner = classify(cells["mask_function"])
    return None if inner is None else replace(inner, positions=cells["position_ids"])


def _fold(parts: tuple[MaskFunction, ...], combine: Callable[[MaskRule, MaskRule], MaskRule | None]) -> MaskRule | None:
    rules = [classify(part) for part in parts]
    result = rules[0]
    for rule in rules[1:]:
        if result is None or rule is None:
            return None
        result = combine(result, rule)
    return result


def _narrower(a: int, b: int) -> int:
    if UNBOUNDED in (a, b):
        return max(a, b)
    return min(a, b)


def _intersection(a: MaskRule, b: MaskRule) -> MaskRule | None:
    if (a.chunk and b.chunk) or (a.sequence_ids is not None and b.sequence_ids is not None):
        return None
    return MaskRule(
        left=_narrower(a.left, b.left),
        right=_narrower(a.right, b.right),
        chunk=a.chunk or b.chunk,
        chunk_start=a.chunk_start if a.chunk else b.chunk_start,
        sequence_ids=a.sequence_ids if a.sequence_ids is not None else b.sequence_ids,
        positions=a.positions if a.positions is not None else b.positions,
    )


def _union(a: MaskRule, b: MaskRule) -> MaskRule | None:
    """The wider of two rules, where one holds the other; two intervals side by side are not one interval."""
    for wide, narrow in ((a, b), (b, a)):
        plain = not wide.chunk and wide.sequence_ids is None and wide.positions is None and narrow.positions is None
        if plain and _holds(wide.left, narrow.left) and _holds(wide.right, narrow.right):
            return wide
    return None


def _holds(wide: int, narrow: int) -> bool:
    return wide == UNBOUNDED or UNBOUNDED != narrow <= wide


def _code(closure: MaskFunction) -> object:
    return closure.__code__


def _readers() -> dict[object, Callable[[Cells], MaskRule | None]]:
    """By code object: every closure that a factory makes shares one, and no other function has it."""
    causal, any_ids = masking_utils.causal_mask_function, torch.zeros(1, 1, dtype=torch.int64)
    readers: dict[object, Callable[[Cells], MaskRule | None]] = {
        # kv > q - window
        _code(masking_utils.sliding_window_overlay(1)): lambda cells: MaskRule(left=cells["sliding_window"] - 1),
        # |q - kv| <= window
        _code(masking_utils.sliding_window_bidirectional_overlay(1)): lambda cells: MaskRule(
            left=cells["sliding_window"], right=cells["sliding_window"]
        ),
        _code(masking_utils.chunked_overlay(1, any_ids[0])): lambda cells: MaskRule(
            chunk=cells["chunk_size"], chunk_start=cells["left_padding"]
        ),
        _code(masking_utils.packed_sequence_mask_function(any_ids)): lambda cells: MaskRule(
            sequence_ids=cells["packed_sequence_mask"]
        ),
        _code(masking_utils.and_masks(causal)): lambda cells: _fold(cells["mask_functions"], _intersection),
        _code(masking_utils.or_masks(causal)): lambda cells: _fold(cells["mask_functions"], _union),
    }
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # newer than transformers 5.17
        readers[_code(masking_utils.remap_positions_for_packed_sequence(causal, any_ids))] = _remapped
    return readers


_CAUSAL_CODE = _code(masking_utils.causal_mask_function)
_BIDIRECTIONAL_CODE = _code(masking_utils.bidirectional_mask_function)
_READERS = _readers()
