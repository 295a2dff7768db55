"""`BlockSparsity`: which 128 x 128 blocks of keys a row of blocks sees, as the Hopper kernel reads it.

Made from FlexAttention's BlockMask, from a mask, or by `block_patterns`. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_backend.block_lists import BLOCK, Evaluate, Grid, Lists, build, unpack
from attention_backend.checks import check_is_tensor, check_tensor
from attention_backend.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, eq=False)
class BlockSparsity:
    """Lists of key blocks for Bm x Hm masks of seqlen_q x seqlen_k; Bm is 1 or batch, Hm is 1 or num_heads.

    With QB = ceil(seqlen_q / 128), blocks aligned to row 0 and key 0. All tensors are int32, contiguous and on the
    device of q; M, P and n are at least 1, and what lies past a count is 0. The bits of keys at and past seqlen_k are
    0; in a full block those keys are hidden by whoever reads it.
    """

    counts: Tensor  # [Bm, Hm, QB, 2]: number of partial blocks, number of all blocks
    blocks: Tensor  # [Bm, Hm, QB, M]: key block numbers, the partial ones first, then the full ones
    bit_rows: Tensor  # [Bm, Hm, QB, P]: for each partial block its row of `bits`
    bits: Tensor  # [n, 128, 4]: bit j % 32 of word j / 32 of row r: row r of the block sees its key j
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def of(
        cls, counts: Tensor, blocks: Tensor, bit_rows: Tensor, bits: Tensor, seqlen_q: int, seqlen_k: int
    ) -> BlockSparsity:
        """Lists made elsewhere. Raises ValueError or TypeError for what a kernel would misread.

        Values are read, so on a GPU this waits for the device.
        """
        check_is_tensor("counts", counts)
        if counts.dim() != 4:
            raise ValueError(f"counts must be [Bm, Hm, QB, 2], got {tuple(counts.shape)}")
        lead, device = tuple(counts.shape[:2]), counts.device
        rows = -(-seqlen_q // BLOCK)
        check_tensor("counts", counts, torch.int32, (*lead, rows, 2), device)
        check_tensor("blocks", blocks, torch.int32, (*lead, rows, None), device)
        check_tensor("bit_rows", bit_rows, torch.int32, (*lead, rows, None), device)
        check_tensor("bits", bits, torch.int32, (None, BLOCK, BLOCK // 32), device)
        for name, x in (("counts", counts), ("blocks", blocks), ("bit_rows", bit_rows), ("bits", bits)):
            if not x.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
        if not blocks.shape[3] or not bit_rows.shape[3] or not bits.shape[0]:
            raise ValueError("blocks, bit_rows and bits need at least one slot each, used or not")
        lists = Lists(counts, blocks, bit_rows, bits)
        _check_values(lists, -(-seqlen_k // BLOCK))
        _check_last_keys(lists, seqlen_k)
        return cls(*lists, seqlen_q, seqlen_k)

    @classmethod
    def build(cls, grid: Grid, numbers: Tensor, full: Tensor, evaluate: Evaluate) -> BlockSparsity:
        """See `block_lists.build`."""
        return cls(*build(grid, numbers, full, evaluate), grid.seqlen_q, grid.seqlen_k)

    @classmethod
    def from_mask(cls, mask: Tensor) -> BlockSparsity:
        """bool `[Bm, Hm, seqlen_q, seqlen_k]`, True where visible. For small ones: the mask itself is quadratic."""
        check_is_tensor("mask", mask)
        if mask.dim() != 4 or mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool [Bm, Hm, seqlen_q, seqlen_k], got {mask.dtype} {tuple(mask.shape)}")
        batch, heads, seqlen_q, seqlen_k = mask.shape
        grid = Grid(seqlen_q, seqlen_k, batch, heads)
        numbers = torch.arange(batch * heads * grid.rows * grid.columns, device=mask.device)

        def evaluate(b: Tensor, h: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            return mask[b[:, None, None], h[:, None, None], rows[:, :, None], keys[:, None, :]]

        return cls.build(grid, numbers, torch.zeros_like(numbers, dtype=torch.bool), evaluate)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockSparsity:
        """FlexAttention's BlockMask, with 128 x 128 blocks. `mask_mod` is evaluated on its partial blocks only, as
        FlexAttention does it (captured tensors may be indexed), some blocks at a time.

        Convert once and keep the result: the conversion costs more than an attention call.
        """
        from torch.nn.attention import flex_attention

        if not isinstance(block_mask, flex_attention.BlockMask):
            raise TypeError(
                f"a BlockSparsity or a BlockMask is wanted, got {type(block_mask).__name__}: make one of a bool mask "
                "by BlockSparsity.from_mask, of a mask_mod by FlexAttention's create_block_mask"
            )
        if tuple(block_mask.BLOCK_SIZE) != (BLOCK, BLOCK):
            raise UnsupportedError(
                f"a BlockMask of BLOCK_SIZE {tuple(block_mask.BLOCK_SIZE)} is not served, only ({BLOCK}, {BLOCK}): "
                f"make it by create_block_mask(..., BLOCK_SIZE={BLOCK})"
            )
        if block_mask.kv_indices.dim() != 4:
            raise UnsupportedError(
                f"a BlockMask of 4 dimensions is wanted, its kv_indices are {tuple(block_mask.kv_indices.shape)}"
            )
        seqlen_q, seqlen_k = block_mask.seq_lengths
        partial, partial_lead = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
        kinds = [(partial, partial_lead, False)]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            kinds.append((*_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices), True))
        batch, heads = torch.broadcast_shapes(*(lead for _, lead, _ in kinds))
        grid = Grid(seqlen_q, seqlen_k, batch, heads)
        numbers, full = [], []
        for places, lead, whole in kinds:
            b, h, row, column = places.unbind(1)
            inside = (row < grid.rows) & (column < grid.columns)
            for extra in _broadcast(lead, (batch, heads), places.device):
                mask = (b + extra[0]) * heads + h + extra[1]
                numbers.append(grid.number(mask, row, column)[inside])
                full.append(torch.full_like(numbers[-1], whole, dtype=torch.bool))
        return cls.build(grid, torch.cat(numbers), torch.cat(full), _mask_mod(block_mask.mask_mod))

    @property
    def lists(self) -> Lists:
        return Lists(self.counts, self.blocks, self.bit_rows, self.bits)

    @property
    def density(self) -> float:
        """Listed blocks of all blocks: what the cost of attention is proportional to."""
        rows, columns = self.counts.shape[:3].numel(), -(-self.seqlen_k // BLOCK)
        return int(self.counts[..., 1].sum()) / (rows * columns) if rows * columns else 0.0

    def to_mask(self) -> Tensor:
        """bool `[Bm, Hm, seqlen_q, seqlen_k]`, True where visible: quadratic, for looking at small ones."""
        batch, heads, rows, width = self.blocks.shape
        columns = -(-self.seqlen_k // BLOCK)
        slots = torch.arange(width, device=self.blocks.device)
        mask = torch.zeros((batch, heads, rows, columns, BLOCK, BLOCK), dtype=torch.bool, device=slots.device)
        listed = (slots < self.counts[..., 1:]).nonzero()
        b, h, row, slot = listed.unbind(1)
        mask[b, h, row, self.blocks[b, h, row, slot].long()] = True
        b, h, row, slot = listed[slot < self.counts[b, h, row, 0]].unbind(1)
        visible = unpack(self.bits[self.bit_rows[b, h, row, slot].long()])
        mask[b, h, row, self.blocks[b, h, row, slot].long()] = visible
        whole = mask.transpose(3, 4).reshape(batch, heads, rows * BLOCK, columns * BLOCK)
        return whole[:, :, : self.seqlen_q, : self.seqlen_k]

    def to(self, device: torch.device | str) -> BlockSparsity:
        return BlockSparsity(*Lists(*(x.to(device) for x in self.lists)), self.seqlen_q, self.seqlen_k)


def _check_values(lists: Lists, columns: int) -> None:
    counts, blocks, bit_rows, bits = lists
    partial, total = counts[..., 0], counts[..., 1]
    if bool(((partial < 0) | (partial > total) | (total > blocks.shape[3]) | (partial > bit_rows.shape[3])).any()):
        raise ValueError(
            f"counts must be 0 <= partial <= all <= {blocks.shape[3]}, with at most {bit_rows.shape[3]} partial blocks"
        )
    for name, x, used, limit in (("blocks", blocks, total, columns), ("bit_rows", bit_rows, partial, bits.shape[0])):
        listed = torch.arange(x.shape[3], device=x.device) < used.unsqueeze(-1)
        if bool((listed & ((x < 0) | (x >= limit))).any()):
            raise ValueError(f"{name} names something outside [0, {limit})")
    slots = torch.arange(blocks.shape[3], device=blocks.device)
    numbers = torch.where(slots < total.unsqueeze(-1), blocks, -1 - slots).sort().values  # unlisted ones all differ
    twice = numbers[..., 1:] == numbers[..., :-1]
    if bool(twice.any()):
        raise ValueError(f"blocks names block {int(numbers[..., 1:][twice][0])} more than once in a row of blocks")


def _check_last_keys(lists: Lists, seqlen_k: int) -> None:
    """Partial blocks are masked by their bits alone, so those of keys that are not there are 0."""
    counts, blocks, bit_rows, bits = lists
    width = min(blocks.shape[3], bit_rows.shape[3])
    partial = torch.arange(width, device=blocks.device) < counts[..., :1]
    named = bit_rows[..., :width][partial & (blocks[..., :width] == seqlen_k // BLOCK)]
    if bool(unpack(bits[named.unique().long()])[..., seqlen_k % BLOCK :].any()):
        raise ValueError(f"bits of the last block show keys past seqlen_k, {seqlen_k}")


def _listed(counts: Tensor, indices: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """int64 `[n, 4]` (batch, head, row, column) of the listed blocks, and how many batches and heads there are."""
    slots = torch.arange(indices.shape[-1], device=indices.device)
    places = (slots < counts.unsqueeze(-1)).nonzero()
    column = indices[tuple(places.unbind(1))].long()
    return torch.cat([places[:, :3], column[:, None]], 1), (counts.shape[0], counts.shape[1])


def _broadcast(lead: tuple[int, int], to: tuple[int, int], device: torch.device) -> Tensor:
    """int64 `[m, 2]`: what to add to (batch, head) so that dimensions of 1 reach all."""
    steps = [torch.arange(n if own == 1 else 1, device=device) for own, n in zip(lead, to, strict=True)]
    return torch.cartesian_prod(*steps).view(-1, 2)


def _mask_mod(mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Evaluate:
    from torch.nn.attention.flex_attention import create_mask

    def evaluate(b: Tensor, h: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        def on_block(n: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask_mod(b[n], h[n], rows[n, i], keys[n, j])

        # create_mask's own vmap: what it evaluates as batches are the blocks of this piece.
        return create_mask(on_block, b.shape[0], 1, BLOCK, BLOCK, device=b.device).squeeze(1)

    return evaluate
