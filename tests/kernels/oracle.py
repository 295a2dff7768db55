"""Attention as plain as possible, one sequence at a time, in any dtype: the truth the kernels are held to.

Written from the rule in `attention_backend.problem.AttentionArgs`, independent of the package's own reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs

_FLOAT64_LIMIT = 1 << 28  # scores of a sequence; above it float32 is truth enough and half the memory


@dataclass(frozen=True)
class Sequence:
    """One sequence of a problem, gathered: q `[n_q, heads, d]`, k and v `[n_k, kv_heads, *]`, visible `[n_q, n_k]`."""

    index: int
    rows: slice  # of total_q for varlen queries, else of seqlen_q
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    distance: Tensor  # |p - j|, int64 [n_q, n_k]


def _bounds(args: AttentionArgs, b: int, num_rows: int, num_keys: int) -> tuple[int, int, int, int, int, int]:
    if args.mask_desc is not None:
        start, stop, q_offset, left, right, chunk = (int(x) for x in args.mask_desc[b, :6])
        return max(start, 0), stop, q_offset, left, right, chunk
    start = 0 if args.leftpad_k is None else int(args.leftpad_k[b])
    stop = num_keys if args.seqused_k is None else min(int(args.seqused_k[b]), num_keys)
    return start, stop, stop - num_rows, args.window_left, args.window_right, args.chunk_size


def _visible(args: AttentionArgs, b: int, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    start, stop, q_offset, left, right, chunk = _bounds(args, b, num_rows, num_keys)
    p = torch.arange(num_rows, device=args.q.device)[:, None] + q_offset
    j = torch.arange(num_keys, device=args.q.device)[None, :]
    visible = ((j >= start) & (j < stop)).expand(num_rows, num_keys)
    if left >= 0:
        visible = visible & (j >= p - left)
    if right >= 0:
        visible = visible & (j <= p + right)
    if chunk > 0:
        same_chunk = (j - start).div(chunk, rounding_mode="floor") == (p - start).div(chunk, rounding_mode="floor")
        visible = visible & same_chunk
    if args.key_mask is not None:
        visible = visible & args.key_mask[b, None, :num_keys]
    return visible, (p - j).abs()


def key_slots(args: AttentionArgs, b: int) -> tuple[Tensor, ...]:
    """Indices of the sequence's keys into k and v: (batch, key), (row,) or (block, offset)."""
    device = args.k.device
    if args.block_table is not None:
        assert args.seqused_k is not None
        j = torch.arange(int(args.seqused_k[b]), device=device)
        return args.block_table[b, j // args.k.shape[1]].long(), j % args.k.shape[1]
    if args.cu_seqlens_k is not None:
        return (torch.arange(int(args.cu_seqlens_k[b]), int(args.cu_seqlens_k[b + 1]), device=device),)
    j = torch.arange(args.k.shape[1], device=device)
    return torch.full_like(j, b), j


def sequences(args: AttentionArgs) -> Iterator[Sequence]:
    for b in range(args.batch):
        if args.cu_seqlens_q is None:
            rows, q = slice(0, args.q.shape[1]), args.q[b]
        else:
            rows = slice(int(args.cu_seqlens_q[b]), int(args.cu_seqlens_q[b + 1]))
            q = args.q[rows]
        slots = key_slots(args, b)
        visible, distance = _visible(args, b, q.shape[0], slots[0].shape[0])
        # What nobody sees may be NaN, and 0 * NaN is NaN.
        seen = visible.any(0)[:, None, None]
        k, v = torch.where(seen, args.k[slots], 0), torch.where(seen, args.v[slots], 0)
        yield Sequence(b, rows, q, k, v, visible, distance)


def _scores(args: AttentionArgs, seq: Sequence, dtype: torch.dtype, reorder: bool) -> Tensor:
    group = args.num_heads // args.num_kv_heads
    q, k = seq.q.to(dtype), seq.k.to(dtype).repeat_interleave(group, dim=1)
    if reorder:
        k = k * args.softmax_scale
    else:
        q = q * args.softmax_scale
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0)  # [heads, n_q, n_k]
    if args.softcap:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes if args.alibi_slopes.ndim == 1 else args.alibi_slopes[seq.index]
        scores = scores - (slopes.to(scores.dtype)[:, None, None] * seq.distance).to(dtype)
    if args.bias is not None:
        scores = scores + args.bias[seq.index if args.bias.shape[0] > 1 else 0].to(dtype)
    return scores.masked_fill(~seq.visible, -torch.inf)


def attention(args: AttentionArgs, dtype: torch.dtype | None = None, *, reorder: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in `dtype` (float64 where it fits when None) and float64. `reorder` scales k instead of q."""
    out = torch.zeros(args.out_shape, dtype=dtype or torch.float64, device=args.q.device)
    lse = torch.full(args.lse_shape, -torch.inf, dtype=torch.float64, device=args.q.device)
    group = args.num_heads // args.num_kv_heads
    for seq in sequences(args):
        n_q, n_k = seq.visible.shape
        if n_q == 0:
            continue
        exact = torch.float64 if args.num_heads * n_q * n_k <= _FLOAT64_LIMIT else torch.float32
        compute = dtype or exact
        scores = _scores(args, seq, compute, reorder)
        logits = scores.to(exact if dtype is None else torch.float32)
        if args.sinks is not None:
            logits = torch.cat([logits, args.sinks.to(logits).view(-1, 1, 1).expand(-1, n_q, 1)], dim=2)
        seq_lse = logits.logsumexp(2) if logits.shape[2] else logits.new_full(logits.shape[:2], -torch.inf)
        empty = ~seq.visible.any(1)
        # A row that sees nothing has lse -inf, sink or not.
        seq_lse = seq_lse.masked_fill(empty, -torch.inf)
        p = logits.softmax(2)[:, :, :n_k].masked_fill(empty[:, None], 0.0).to(compute)
        seq_out = (p @ seq.v.to(compute).repeat_interleave(group, dim=1).transpose(0, 1)).transpose(0, 1)
        if args.cu_seqlens_q is None:
            out[seq.index], lse[seq.index] = seq_out.to(out.dtype), seq_lse.double()
        else:
            out[seq.rows], lse[:, seq.rows] = seq_out.to(out.dtype), seq_lse.double()
    return out, lse
