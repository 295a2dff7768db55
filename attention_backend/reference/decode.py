"""Decoding over the engine's pages: one row per sequence, few torch calls, as those are what a short context costs.

What follows from lengths and block tables alone is made once a step, not once a layer. Exact like `cpu`, and linear in
memory: keys and values are copied out of their pages, a few sequences at a time.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs
from attention_backend.reference import fused
from attention_backend.reference.contents import ByContents
from attention_backend.reference.merge import merge_states
from attention_backend.reference.tiles import compute_dtype
from attention_backend.reference.visibility import row_intervals

#: Elements of keys and values copied at a time: 4 MiB of float32, which a cache holds.
_MAX_COPIED = 1 << 20
#: The same of one sequence, which may be more. A step with a longer context is left to the tiled path.
_LONGEST_COPIED = 1 << 22
#: Up to this many keys, sequences are padded to one another; above, only within a power of two.
_SHORT = 512


@dataclass(frozen=True, slots=True)
class _Part:
    """n sequences whose visible pages, at most P each, are copied out together."""

    sequences: Tensor | None  # int64 [n]; None: all, in order
    pieces: Tensor  # int64 [n * num_kv_heads * P]: rows of a cache viewed as [num_blocks * num_kv_heads, ...]
    seen: slice | None  # of the P * block_size keys, where all sequences see the same ones
    all_see: bool  # every sequence a key
    bias: Tensor  # float32 [n, 1, P * block_size]: 0 for a key in sight, -inf for others


_plans: ByContents[list[_Part]] = ByContents()


def serves(args: AttentionArgs) -> bool:
    """One row a sequence, nothing that needs positions, and pages of a head in one piece (the engine's layout)."""
    return (
        args.block_table is not None
        and args.cu_seqlens_q is None
        and args.q.shape[1] == 1
        and args.seqused_k is not None
        and args.mask_desc is None
        and args.key_mask is None
        and args.bias is None
        and args.alibi_slopes is None
        and args.q.numel() > 0
        and args.k.numel() > 0
        and args.block_table.numel() > 0
        and _copied(args, args.block_table.shape[1] * args.k.shape[1]) <= _LONGEST_COPIED
        and args.k.transpose(1, 2).is_contiguous()
        and args.v.transpose(1, 2).is_contiguous()
    )


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out `[batch, 1, num_heads, Dv]` in q's dtype, lse `[batch, num_heads, 1]` in the compute dtype."""
    plan = _plans.get(
        lambda: _plan(args),
        (args.block_table, args.seqused_k, args.leftpad_k),
        args.k.shape,
        args.v.shape[3],
        args.window_left,
        args.window_right,
        args.chunk_size,
    )
    if len(plan) == 1 and plan[0].sequences is None:
        out, lse = _attend(args, plan[0], args.q)
        return out.to(args.dtype), lse
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=compute_dtype(args.dtype))
    for part in plan:
        part_out, part_lse = _attend(args, part, args.q[part.sequences])
        out[part.sequences], lse[part.sequences] = part_out.to(args.dtype), part_lse
    return out, lse


def of_step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PagedMetadata,
    softmax_scale: float,
    window_left: int,
    chunk_size: int,
    sinks: Tensor | None,
) -> Tensor | None:
    """A layer of a step that only decodes, q `[num_seqs, num_heads, D]`, by the fused kernel with as little beside it
    as can be; None where `forward` has to do it. The step's lengths and tables are looked at for its first layer."""
    key = (of_step, k_cache.shape, v_cache.shape, q.dtype, window_left, chunk_size)
    parts = step.plans.get(key)
    if parts is None:
        args = AttentionArgs(
            q.unsqueeze(1), k_cache.transpose(1, 2), v_cache.transpose(1, 2), softmax_scale,
            max_seqlen_k=step.max_seqlen_k, seqused_k=step.seq_lens, block_table=step.block_table,
            window_left=window_left, window_right=0, chunk_size=chunk_size, sinks=sinks,
        )  # fmt: skip
        parts = _plan(args) if serves(args) and fused.knows(args) else []
        parts = step.plans[key] = parts if all(part.all_see for part in parts) else []
    rows, out = q.unsqueeze(1), None
    for part in parts:
        some = rows if part.sequences is None else rows[part.sequences]
        part_out, _ = _by_fused_kernel(some, k_cache, v_cache, part, softmax_scale, sinks)
        if part.seen is None and not math.isfinite(part_out.sum().item()):
            return None
        if part.sequences is None:
            return part_out.view(q.shape)
        out = torch.empty_like(q) if out is None else out
        out[part.sequences] = part_out.squeeze(1)
    return out


def _copied(args: AttentionArgs, num_keys: int) -> int:
    """Elements of keys and values of one sequence."""
    return num_keys * args.num_kv_heads * (args.head_dim + args.head_dim_v)


def _plan(args: AttentionArgs) -> list[_Part]:
    assert args.block_table is not None
    (num_blocks, block_size, heads), device = args.k.shape[:3], args.q.device
    capacity = args.block_table.shape[1] * block_size
    low, high, _ = (x.squeeze(1).cpu() for x in row_intervals(args, slice(0, args.batch), 1, capacity))
    first = low // block_size  # pages before a window are not read
    counts = (-(-high // block_size) - first).clamp_min(1)
    buckets: dict[int, list[int]] = {}
    for index, count in enumerate(counts.tolist()):
        buckets.setdefault((max(count * block_size, _SHORT) - 1).bit_length(), []).append(index)
    parts = []
    table = args.block_table.long().cpu()
    for members in buckets.values():
        longest = int(counts[members].max())
        size = max(1, _MAX_COPIED // _copied(args, longest * block_size))
        for start in range(0, len(members), size):
            b = torch.tensor(members[start : start + size])
            columns = first[b, None] + torch.arange(longest)  # [n, P]
            # Pages that a sequence does not have, or does not see, are any page: their slots are masked.
            pages = table[b].gather(1, columns.clamp_max(table.shape[1] - 1)).clamp(0, num_blocks - 1)
            pieces = pages.unsqueeze(1) * heads + torch.arange(heads).unsqueeze(1)  # [n, heads, P]
            keys = (columns.unsqueeze(2) * block_size + torch.arange(block_size)).flatten(1)  # [n, P * block_size]
            seen = (keys >= low[b, None]) & (keys < high[b, None])
            bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1)
            everyone = None if len(b) == args.batch else b.to(device)
            begin, end = (x[b] - first[b] * block_size for x in (low, high))
            all_see = bool((begin < end).all())
            alike = all_see and bool((begin == begin[0]).all() & (end == end[0]).all())
            same = slice(int(begin[0]), int(end[0])) if alike else None
            parts.append(_Part(everyone, pieces.flatten().to(device), same, all_see, bias.to(device)))
    return parts


def _attend(args: AttentionArgs, part: _Part, q: Tensor) -> tuple[Tensor, Tensor]:
    """q `[n, 1, num_heads, D]` -> out `[n, 1, num_heads, Dv]` and lse `[n, num_heads, 1]` in the compute dtype."""
    if part.all_see and fused.knows(args):
        out, lse = _by_fused_kernel(
            q, args.k.transpose(1, 2), args.v.transpose(1, 2), part, args.softmax_scale, args.sinks
        )
        # Slots out of sight may hold NaN or Inf, where they were not left out.
        if part.seen is not None or math.isfinite(out.sum().item()):
            return out, lse
    dtype = compute_dtype(args.dtype)
    n, heads, length = q.shape[0], args.num_kv_heads, part.bias.shape[2]
    rows = q.reshape(n * heads, -1, args.head_dim).to(dtype) * args.softmax_scale
    if args.k_scale is not None:  # a key's scale is one factor of all its head's scores
        rows = rows * args.k_scale.to(dtype).repeat(n)[:, None, None]
    k, v = (
        _pieces(cache.transpose(1, 2).flatten(0, 1), part.pieces).to(dtype).view(n * heads, length, -1)
        for cache in (args.k, args.v)
    )
    out, lse = _softmax(args, part, rows, k, v)
    if not math.isfinite(out.sum().item()):  # slots out of sight may hold NaN or Inf: then again with 0 there
        hidden = (part.bias == -torch.inf).expand(n, heads, length).reshape(n * heads, length, 1)
        out, lse = _softmax(args, part, rows, k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0))
    if args.v_scale is not None:
        out = out * args.v_scale.to(dtype).repeat_interleave(args.num_heads // heads)[:, None]
    return out.view(n, 1, args.num_heads, args.head_dim_v), lse


def _by_fused_kernel(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, part: _Part, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As _attend. Caches `[num_blocks, num_kv_heads, block_size, *]`; the query heads of a key head are its rows."""
    (n, _, num_heads, dim), heads = q.shape, k_cache.shape[1]
    k, v = (x.flatten(0, 1).index_select(0, part.pieces).view(n, heads, -1, dim) for x in (k_cache, v_cache))
    bias = None
    if part.seen is None:
        bias = part.bias.unsqueeze(1)
    else:
        k, v = k[:, :, part.seen], v[:, :, part.seen]
    out, lse = fused.attention(q.reshape(n, heads, -1, dim), k, v, scale, bias=bias)
    out, lse = out.reshape(q.shape), lse.reshape(n, num_heads, 1)
    return (out, lse) if sinks is None else merge_states([out], [lse], sinks)


def _pieces(pool: Tensor, which: Tensor) -> Tensor:
    """Rows of a pool; float8 has no index_select, so as bytes."""
    if pool.itemsize == 1:
        return pool.view(torch.uint8).index_select(0, which).view(pool.dtype)
    return pool.index_select(0, which)


def _softmax(args: AttentionArgs, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q `[n * num_kv_heads, G, D]`, scaled -> out `[n, num_heads, Dv]` and lse `[n, num_heads, 1]`"""
    s = torch.bmm(q, k.mT)
    if args.softcap:
        s = torch.tanh(s / args.softcap) * args.softcap
    p = s.view(part.bias.shape[0], args.num_heads, -1).add_(part.bias)
    row_max = p.amax(2, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)  # a row without keys: exp(-inf) = 0
    row_sum = p.sub_(row_max).exp_().sum(2, keepdim=True)
    out = torch.bmm(p.view(s.shape), v).view(p.shape[0], args.num_heads, -1)
    lse = row_sum.log().add_(row_max)
    if args.sinks is None:
        return out.div_(row_sum.clamp_min_(1.0)), lse  # the largest score adds 1 to the sum, unless there is none
    with_sink = torch.logaddexp(lse, args.sinks.to(lse.dtype).view(1, -1, 1)).masked_fill_(
        lse == -torch.inf, -torch.inf
    )
    return out.mul_(torch.exp(row_max - with_sink.clamp_min(torch.finfo(torch.float32).min))), with_sink
