"""From blocks that may hold something visible to the lists that kernels read: bits packed and deduplicated.

Memory follows the number of blocks named, never seqlen_q x seqlen_k. Knows no pattern and no FlexAttention.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Rows and keys of a block.
BLOCK = 128
_WORD = 32
_WORDS = BLOCK // _WORD
_PIECE = 128  # blocks evaluated at a time: 2^21 pairs, 16 MiB for each int64 that a mask function makes of them

#: (batch `[n]`, head `[n]`, rows `[n, 128]`, keys `[n, 128]`) -> bool `[n, 128, 128]`: which pairs are visible.
Evaluate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Lists(NamedTuple):
    """The tensors of a `BlockSparsity`."""

    counts: Tensor
    blocks: Tensor
    bit_rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """The 128 x 128 blocks of `batch` x `heads` masks of seqlen_q x seqlen_k. A block's number is one int64."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 1

    def __post_init__(self) -> None:
        if min(self.seqlen_q, self.seqlen_k, self.batch, self.heads) < 1:
            raise ValueError(f"lengths, batch and heads must be at least 1, got {self}")

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // BLOCK)

    @property
    def columns(self) -> int:
        return -(-self.seqlen_k // BLOCK)

    def number(self, mask: Tensor | int, row: Tensor, column: Tensor) -> Tensor:
        """`mask` is batch index * heads + head."""
        return (mask * self.rows + row) * self.columns + column

    def split(self, number: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(batch, head, row of blocks, column of blocks)"""
        line, column = number // self.columns, number % self.columns
        mask = line // self.rows
        return mask // self.heads, mask % self.heads, line % self.rows, column


def build(grid: Grid, numbers: Tensor, full: Tensor, evaluate: Evaluate) -> Lists:
    """`numbers` int64 `[n]` (in any order, repeats allowed) covers every block with a visible pair; `full` bool `[n]`
    marks those known to be visible whole. The others are evaluated: empty ones are dropped, whole ones become full.

    "Whole" is about pairs that exist: rows and keys past the lengths do not count, and their bits are 0.
    """
    numbers, inverse = torch.unique(numbers, return_inverse=True)
    whole = torch.zeros_like(numbers, dtype=torch.bool)
    whole[inverse[full]] = True
    known, open_numbers = numbers[whole], numbers[~whole]
    store: dict[bytes, int] = {}  # the bits of a block -> its row
    found, partial, bit_rows = [known], [torch.zeros_like(known, dtype=torch.bool)], [torch.full_like(known, -1)]
    for start in range(0, open_numbers.numel(), _PIECE):
        piece = open_numbers[start : start + _PIECE]
        visible, exists = _pairs(grid, piece, evaluate)
        kept = visible.flatten(1).any(1)
        open_block = kept & ~(visible | ~exists).flatten(1).all(1)
        rows = torch.full_like(piece, -1)
        rows[open_block] = _deduplicate(pack(visible[open_block]), store)
        found.append(piece[kept])
        partial.append(open_block[kept])
        bit_rows.append(rows[kept])
    counts, blocks, rows_of_bits = _lay_out(grid, torch.cat(found), torch.cat(partial), torch.cat(bit_rows))
    bits = np.frombuffer(b"".join(store) or bytes(BLOCK * _WORDS * 4), dtype=np.int32).copy()
    return Lists(counts, blocks, rows_of_bits, torch.from_numpy(bits).view(-1, BLOCK, _WORDS).to(numbers.device))


def pack(visible: Tensor) -> Tensor:
    """bool `[n, 128, 128]` -> int32 `[n, 128, 4]`: bit j % 32 of word j / 32 is key j."""
    shift = torch.arange(_WORD, dtype=torch.int32, device=visible.device)
    return (visible.unflatten(2, (_WORDS, _WORD)).to(torch.int32) << shift).sum(-1, dtype=torch.int32)


def unpack(bits: Tensor) -> Tensor:
    """int32 `[n, 128, 4]` -> bool `[n, 128, 128]`"""
    shift = torch.arange(_WORD, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shift) & 1).flatten(2).bool()


def _pairs(grid: Grid, numbers: Tensor, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
    """(visible, exists), bool `[n, 128, 128]`. `evaluate` gets only rows and keys that exist."""
    batch, head, row, column = grid.split(numbers)
    within = torch.arange(BLOCK, device=numbers.device)
    rows, keys = row[:, None] * BLOCK + within, column[:, None] * BLOCK + within
    exists = (rows < grid.seqlen_q)[:, :, None] & (keys < grid.seqlen_k)[:, None, :]
    rows, keys = rows.clamp_max(grid.seqlen_q - 1), keys.clamp_max(grid.seqlen_k - 1)
    return evaluate(batch, head, rows, keys).expand(exists.shape) & exists, exists


def _deduplicate(bits: Tensor, store: dict[bytes, int]) -> Tensor:
    """The row of each block's bits in the store, new ones added: int64 `[n]`."""
    rows = [store.setdefault(block.tobytes(), len(store)) for block in bits.cpu().numpy()]
    return torch.tensor(rows, dtype=torch.int64, device=bits.device)


def _lay_out(grid: Grid, numbers: Tensor, partial: Tensor, bit_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(counts, blocks, bit_rows): in each row of blocks the partial ones first, both in order of keys."""
    lines, device = grid.batch * grid.heads * grid.rows, numbers.device
    line, column = numbers // grid.columns, numbers % grid.columns
    order = ((line * 2 + (~partial).long()) * grid.columns + column).argsort()
    line, column, partial, bit_rows = line[order], column[order], partial[order], bit_rows[order]
    total = torch.bincount(line, minlength=lines)
    partials = torch.bincount(line[partial], minlength=lines)
    slot = torch.arange(line.numel(), device=device) - (total.cumsum(0) - total)[line]

    def table(counts: Tensor, lines_of: Tensor, slots: Tensor, values: Tensor) -> Tensor:
        # At least one slot, so that a kernel always has an address; what is past a row's count is 0.
        width = max(1, int(counts.max()))
        filled = torch.zeros((lines, width), dtype=torch.int32, device=device)
        filled[lines_of, slots] = values.to(torch.int32)
        return filled.view(grid.batch, grid.heads, grid.rows, width)

    counts = torch.stack([partials, total], 1).to(torch.int32).view(grid.batch, grid.heads, grid.rows, 2)
    return counts, table(total, line, slot, column), table(partials, line[partial], slot[partial], bit_rows[partial])


def host_rows(lists: Lists) -> Iterator[tuple[int, int, int, list[int], list[int]]]:
    """(batch, head, row of blocks, key blocks, rows of bits of the first of them), for code that walks them in
    Python. Copies the lists to the host once."""
    counts, blocks, bit_rows = (x.cpu() for x in (lists.counts, lists.blocks, lists.bit_rows))
    for batch in range(counts.shape[0]):
        for head in range(counts.shape[1]):
            for row, (partial, total) in enumerate(counts[batch, head].tolist()):
                columns = blocks[batch, head, row, :total].tolist()
                yield batch, head, row, columns, bit_rows[batch, head, row, :partial].tolist()
