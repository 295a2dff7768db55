"""Which blocks a pattern may touch, and which it surely shows whole: a superset, made exact by evaluating the rest.

Memory follows the blocks named and the length. Knows no list and no kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.block_lists import BLOCK, Grid

#: Numbers of blocks to look at, int64 `[n]`, and which of them are known to be visible whole, bool `[n]`.
Candidates = tuple[Tensor, Tensor]


def intervals(grid: Grid, low: Tensor, high: Tensor) -> Candidates:
    """Blocks between the least `low` and the greatest `high` of each row block, where row i sees keys low <= j < high:
    int64 `[seqlen_q]` or `[masks, seqlen_q]`."""
    low, high = (x.clamp(0, grid.seqlen_k).reshape(-1, grid.seqlen_q) for x in (low, high))
    empty = low >= high
    low, high = low.masked_fill(empty, grid.seqlen_k), high.masked_fill(empty, 0)

    def of_blocks(x: Tensor, fill: int) -> Tensor:  # [masks * rows, 128]
        return by_block(grid, x, fill).reshape(-1, BLOCK)

    first = of_blocks(low, grid.seqlen_k).amin(1) // BLOCK
    stop = (of_blocks(high, 0).amax(1) + BLOCK - 1) // BLOCK
    whole_from, whole_to = of_blocks(low, 0).amax(1), of_blocks(high, grid.seqlen_k).amin(1)
    line, column = _ranges(first, stop)
    full = (column * BLOCK >= whole_from[line]) & (((column + 1) * BLOCK).clamp_max(grid.seqlen_k) <= whole_to[line])
    return line * grid.columns + column, full


def pairs(grid: Grid, rows: Tensor, columns: Tensor) -> Candidates:
    """Every row block of `rows` with every column block of `columns`, to be looked at."""
    numbers = grid.number(0, rows[:, None], columns[None, :]).flatten()
    return numbers, torch.zeros_like(numbers, dtype=torch.bool)


def sharing_blocks(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, row block, column block) of blocks that hold tokens of one document, repeats allowed."""
    batch, place = (ids >= 0).nonzero(as_tuple=True)
    names, name = torch.unique(ids[batch, place], return_inverse=True)
    owners, document = torch.unique(batch * max(1, names.numel()) + name, return_inverse=True)
    columns = -(-ids.shape[1] // BLOCK)
    member = torch.unique(document * columns + place // BLOCK)  # sorted by document, then block
    document, block = member // columns, member % columns
    size = torch.bincount(document)
    start = (size.cumsum(0) - size)[document]
    first, second = _ranges(start, start + size[document])
    return (owners // max(1, names.numel()))[document[first]], block[first], block[second]


def by_block(grid: Grid, x: Tensor, fill: int) -> Tensor:
    """x `[*, seqlen_q]` padded to whole blocks."""
    return F.pad(x, (0, grid.rows * BLOCK - grid.seqlen_q), value=fill)


def _ranges(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """(owner, value): every value of `[first[i], stop[i])` for every i, flat."""
    lengths = (stop - first).clamp_min(0)
    owner = torch.repeat_interleave(torch.arange(first.numel(), device=first.device), lengths)
    before = lengths.cumsum(0) - lengths
    return owner, torch.arange(owner.numel(), device=first.device) - before[owner] + first[owner]
