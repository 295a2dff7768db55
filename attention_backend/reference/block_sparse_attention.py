"""Exact block-sparse attention over the lists of a `BlockSparsity`, forward and backward, in plain torch on any device.

Work and memory follow the listed blocks; nothing of an unlisted block is read. Reads the lists on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.block_lists import BLOCK, Lists, host_rows, unpack
from attention_backend.reference.tiles import compute_dtype

_TILE_ELEMENTS = 1 << 22  # scores of a tile


@dataclass(frozen=True, slots=True)
class _Line:
    """A row of blocks of one list: what shares it is computed together, n sequences and K key heads of G heads."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: slice
    blocks: list[int]
    bit_rows: list[int]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys of some blocks of a line: index int64 `[C]`, mask bool `[R, C]`, None where all are visible."""

    index: Tensor
    mask: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, lists: Lists) -> tuple[Tensor, Tensor]:
    """q `[batch, seqlen_q, num_heads, D]`, k, v `[batch, seqlen_k, num_kv_heads, *]` -> out in q's dtype, lse
    `[batch, num_heads, seqlen_q]` in float32 (float64 for float64). Rows that see nothing: 0 and -inf."""
    dtype = compute_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    for line in _lines(q, k, lists):
        rows = _grouped(q, line) * softmax_scale  # [n, K, G * R, D]
        row_max = rows.new_full(rows.shape[:3], -torch.inf)
        row_sum = torch.zeros_like(row_max)
        acc = rows.new_zeros(*rows.shape[:3], v.shape[-1])
        for keys in _pieces(line, rows, k.shape[1], lists.bits):
            s = _scores(rows, _gathered(k, line, keys), keys.mask)
            new_max = torch.maximum(row_max, s.amax(-1))
            shift = new_max.masked_fill(new_max == -torch.inf, 0.0)  # nothing seen yet: exp(-inf - 0) = 0
            p = s.sub_(shift.unsqueeze(-1)).exp_()
            decay = torch.exp(row_max - shift)
            row_sum = row_sum * decay + p.sum(-1)
            acc = acc * decay.unsqueeze(-1) + p @ _gathered(v, line, keys)
            row_max = new_max
        result = acc / row_sum.masked_fill(row_sum == 0, 1.0).unsqueeze(-1)
        out[line.batch, line.rows, line.heads] = _ungrouped(result, line).to(out.dtype)
        lse[line.batch, line.heads, line.rows] = _heads(row_max + row_sum.log(), line)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    softmax_scale: float,
    lists: Lists,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); `out` and `lse` are forward's. Probabilities are computed again from lse, block by block."""
    dtype = compute_dtype(q.dtype)
    dq = q.new_zeros(q.shape)
    dk, dv = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    for line in _lines(q, k, lists):
        row_lse = lse[line.batch, line.heads, line.rows].to(dtype)
        row_lse = row_lse.reshape(row_lse.shape[0], dk[:, :, line.kv_heads].shape[2], -1, 1)  # [n, K, G * R, 1]
        dead = row_lse == -torch.inf  # what sees nothing counts as zero, whatever it holds
        rows, do = (_grouped(x, line).masked_fill(dead, 0.0) for x in (q, grad_out))
        # D_i = do_i . o_i (FlashAttention, appendix B.2); lse's own gradient enters at the same place.
        own = grad_lse[line.batch, line.heads, line.rows].to(dtype).reshape(row_lse.shape).masked_fill(dead, 0.0)
        delta = (do * _grouped(out, line)).sum(-1, keepdim=True) - own
        row_lse = row_lse.masked_fill(dead, torch.inf)  # exp(s - inf) = 0
        scaled, dq_rows = rows * softmax_scale, torch.zeros_like(rows)
        for keys in _pieces(line, rows, k.shape[1], lists.bits):
            k_block, v_block = _gathered(k, line, keys), _gathered(v, line, keys)
            p = torch.exp(_scores(scaled, k_block, keys.mask) - row_lse)
            ds = p * (do @ v_block.mT - delta)
            dq_rows += ds @ k_block
            for total, part in ((dk, ds.mT @ scaled), (dv, p.mT @ do)):
                total[line.batch, :, line.kv_heads].index_add_(1, keys.index, part.transpose(1, 2))
        dq[line.batch, line.rows, line.heads] = _ungrouped(dq_rows * softmax_scale, line).to(dq.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _lines(q: Tensor, k: Tensor, lists: Lists) -> Iterator[_Line]:
    group = q.shape[2] // k.shape[2]
    if q.numel() == 0:
        return
    shared_batch, shared_heads = lists.counts.shape[0] == 1, lists.counts.shape[1] == 1
    for batch, head, row, blocks, bit_rows in host_rows(lists):
        if blocks:
            yield _Line(
                slice(0, q.shape[0]) if shared_batch else slice(batch, batch + 1),
                slice(0, q.shape[2]) if shared_heads else slice(head, head + 1),
                slice(0, k.shape[2]) if shared_heads else slice(head // group, head // group + 1),
                slice(row * BLOCK, min((row + 1) * BLOCK, q.shape[1])),
                blocks,
                bit_rows,
            )


def _pieces(line: _Line, rows: Tensor, seqlen_k: int, bits: Tensor) -> Iterator[_Keys]:
    """The line's keys, a few blocks at a time: partial ones, then full ones."""
    step = max(1, _TILE_ELEMENTS // (rows.shape[:3].numel() * BLOCK))
    num_rows, num_partial = line.rows.stop - line.rows.start, len(line.bit_rows)
    within = torch.arange(BLOCK)
    for first, last in ((0, num_partial), (num_partial, len(line.blocks))):
        for start in range(first, last, step):
            blocks = torch.tensor(line.blocks[start : min(start + step, last)])
            index = (blocks[:, None] * BLOCK + within).flatten()
            exists = (index < seqlen_k).nonzero().squeeze(1)
            mask = None
            if start < num_partial:
                block_bits = bits[line.bit_rows[start : start + len(blocks)]]
                mask = unpack(block_bits).transpose(0, 1).flatten(1)[:num_rows, exists.to(bits.device)]
            yield _Keys(index[exists].to(bits.device), mask)


def _scores(rows: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """`[n, K, G * R, C]` from rows `[n, K, G * R, D]` that carry the scale and keys `[n, K, C, D]`."""
    s = rows @ keys.mT
    if mask is not None:
        s.unflatten(2, (-1, mask.shape[0])).masked_fill_(~mask, -torch.inf)
    return s


def _grouped(x: Tensor, line: _Line) -> Tensor:
    """The line's rows of x `[batch, seqlen_q, num_heads, D]` as `[n, K, G * R, D]` in the compute dtype."""
    x = x[line.batch, line.rows, line.heads].to(compute_dtype(x.dtype))
    kv_heads = line.kv_heads.stop - line.kv_heads.start
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, line: _Line) -> Tensor:
    """`[n, K, G * R, D]` -> `[n, R, heads of the line, D]`"""
    return x.unflatten(2, (-1, line.rows.stop - line.rows.start)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _heads(x: Tensor, line: _Line) -> Tensor:
    """`[n, K, G * R]` -> `[n, heads of the line, R]`"""
    return x.reshape(x.shape[0], -1, line.rows.stop - line.rows.start)


def _gathered(x: Tensor, line: _Line, keys: _Keys) -> Tensor:
    """Keys of x `[batch, seqlen_k, num_kv_heads, D]` as `[n, K, C, D]` in the compute dtype."""
    picked = x[line.batch, :, line.kv_heads].index_select(1, keys.index)
    return picked.transpose(1, 2).to(compute_dtype(x.dtype))
