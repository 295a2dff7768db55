"""Examples -> rows of packed sequences without padding, up to a budget of tokens each. Knows no model.

Every sequence keeps positions of its own, and cu_seqlens tells the attention where it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from models.training.examples import Example, Preference, sequences


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward's sequences, one after the other; a preference is two of them, chosen first."""

    indices: tuple[int, ...]  # the examples
    input_ids: Tensor  # int64 [1, tokens]
    position_ids: Tensor  # int64 [1, tokens]
    cu_seqlens: Tensor  # int32 [num_seqs + 1]
    max_length: int
    rows: Tensor  # int64 [learnt]: the tokens whose next token is learnt
    labels: Tensor  # int64 [learnt]: those next tokens
    learnt: tuple[int, ...]  # learnt tokens of each sequence

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def pack(examples: Sequence[Example | Preference], indices: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Which of `examples[i] for i in indices` go into one forward: first fit, longest first; by their lengths alone.

    None holds more than `budget` tokens, unless a single example does.
    """
    bins: list[list[int]] = []
    longest_first = sorted(indices, key=lambda i: -len(examples[i]))  # stable: equal lengths keep their order
    # A heap of bins, all those that there may ever be: node i is the most room below it, which 2i and 2i + 1 share out.
    leaves = 1 << max(0, len(longest_first) - 1).bit_length()
    room = [budget] * (2 * leaves)
    for index in longest_first:
        length = len(examples[index])
        node = 1 if length <= budget else leaves + len(bins)
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [tuple(bin_) for bin_ in bins]


def build(
    examples: Sequence[Example | Preference], indices: tuple[int, ...], device: torch.device | str
) -> PackedBatch:
    """The tensors of one forward over `examples[i] for i in indices`."""
    parts = [part for index in indices for part in sequences(examples[index])]
    starts = [0, *accumulate(len(part) for part in parts)]
    tokens = [token for part in parts for token in part.tokens]
    rows = [
        start + i
        for start, part in zip(starts, parts, strict=False)
        for i, learnt in enumerate(part.targets[1:])
        if learnt
    ]

    def to_device(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return PackedBatch(
        indices=indices,
        input_ids=to_device(tokens)[None],
        position_ids=to_device([i for part in parts for i in range(len(part))])[None],
        cu_seqlens=to_device(starts, torch.int32),
        max_length=max(len(part) for part in parts),
        rows=to_device(rows),
        labels=to_device([tokens[row + 1] for row in rows]),
        learnt=tuple(part.learnt for part in parts),
    )
