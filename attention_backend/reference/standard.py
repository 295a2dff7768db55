"""The slow truth: standard attention (FlashAttention paper, Algorithm 0), one sequence at a time, nothing tiled.

Written for reading and for being right; memory is quadratic. Differentiable by plain autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference.dropout import kept


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence, gathered: q `[rows, H, D]`, k, v `[keys, Hkv, *]`, visible `[rows, keys]`, distance |p - j|."""

    index: int
    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    distance: Tensor


def attention(args: AttentionArgs, compute_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse), both in `compute_dtype`, shaped `args.out_shape` and `args.lse_shape`."""
    return _attention(args, compute_dtype, compute_dtype, scale_keys=False)


def same_dtype(args: AttentionArgs) -> Tensor:
    """The same formula in the inputs' own dtype, the scale applied to k instead of q: out, `args.out_shape`.

    What plain torch makes of rounding, the yardstick of FlashAttention's tests:
    `|out - truth| <= 2 * |same_dtype - truth|` plus a little.
    """
    softmax_dtype = torch.promote_types(args.dtype, torch.float32)
    return _attention(args, args.dtype, softmax_dtype, scale_keys=True)[0]


def _attention(
    args: AttentionArgs, dtype: torch.dtype, softmax_dtype: torch.dtype, *, scale_keys: bool
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for seq in _sequences(args):
        s = _scores(args, seq, dtype, scale_keys=scale_keys).to(softmax_dtype)  # [H, rows, keys]
        s = s.masked_fill(~seq.visible, -torch.inf)
        empty = (s == -torch.inf).all(-1, keepdim=True)  # also when a bias of -inf hides everything
        logits = s.masked_fill(empty, 0.0)  # no softmax of nothing: its gradient is NaN
        if args.sinks is not None:
            sinks = args.sinks.to(logits.dtype)[:, None, None].expand(-1, s.shape[1], 1)
            logits = torch.cat([logits, sinks], -1)
        elif s.shape[2] == 0:
            logits = s.new_zeros(*s.shape[:2], 1)
        p = logits.softmax(-1)[..., : s.shape[2]].masked_fill(empty, 0.0).to(dtype)
        if args.dropout_threshold and args.dropout_seed is not None:
            everything = (slice(0, s.shape[1]), slice(0, s.shape[2]))
            sequence = torch.tensor([seq.index], device=s.device)
            keep = kept(args.dropout_seed, sequence, args.num_heads, *everything, args.dropout_threshold)[0]
            p = p.masked_fill(~keep, 0.0) * args.dropout_scale
        group = args.num_heads // args.num_kv_heads
        v = seq.v.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
        outs.append((p @ v).transpose(0, 1))
        lses.append(logits.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf))
    if args.cu_seqlens_q is None:
        if not outs:
            return args.q.new_zeros(args.out_shape, dtype=dtype), args.q.new_zeros(args.lse_shape, dtype=softmax_dtype)
        return torch.stack(outs), torch.stack(lses)
    rest = args.q.shape[0] - sum(o.shape[0] for o in outs)  # rows past the last sequence belong to nobody
    outs.append(args.q.new_zeros(rest, *args.out_shape[1:], dtype=dtype))
    lses.append(args.q.new_full((args.num_heads, rest), -torch.inf, dtype=softmax_dtype))
    return torch.cat(outs), torch.cat(lses, 1)


def _scores(args: AttentionArgs, seq: _Sequence, dtype: torch.dtype, *, scale_keys: bool) -> Tensor:
    q, k = seq.q.to(dtype), seq.k.to(dtype)
    q, k = (q, k * args.softmax_scale) if scale_keys else (q * args.softmax_scale, k)
    k = k.repeat_interleave(args.num_heads // args.num_kv_heads, dim=1)
    s = torch.einsum("ihd,jhd->hij", q, k)
    if args.softcap:
        s = args.softcap * torch.tanh(s / args.softcap)
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes if args.alibi_slopes.dim() == 1 else args.alibi_slopes[seq.index]
        s = s - slopes.to(dtype)[:, None, None] * seq.distance.to(dtype)
    if args.bias is not None:
        s = s + args.bias[seq.index if args.bias.shape[0] > 1 else 0].to(dtype)
    return s


def _sequences(args: AttentionArgs) -> Iterator[_Sequence]:
    for b in range(args.batch):
        if args.cu_seqlens_q is None:
            rows, q = slice(0, args.q.shape[1]), args.q[b]
        else:
            rows = slice(int(args.cu_seqlens_q[b]), int(args.cu_seqlens_q[b + 1]))
            q = args.q[rows]
        k, v = _keys(args, args.k, b), _keys(args, args.v, b)
        if args.k_scale is not None and args.v_scale is not None:
            k, v = k.double() * args.k_scale.double()[:, None], v.double() * args.v_scale.double()[:, None]
        visible, distance = _visible(args, b, q.shape[0], k.shape[0])
        seen = visible.any(0)[:, None, None]  # what nobody sees may be NaN, and 0 * NaN is NaN
        q = torch.where(visible.any(1)[:, None, None], q, 0)
        yield _Sequence(b, rows, q, torch.where(seen, k, 0), torch.where(seen, v, 0), visible, distance)


def _keys(args: AttentionArgs, x: Tensor, b: int) -> Tensor:
    if args.block_table is not None:
        # Table entries past the sequence's length may be anything.
        pages = args.block_table[b].long().clamp(0, x.shape[0] - 1)
        return x[pages].flatten(0, 1)
    if args.cu_seqlens_k is not None:
        return x[int(args.cu_seqlens_k[b]) : int(args.cu_seqlens_k[b + 1])]
    return x[b]


def _visible(args: AttentionArgs, b: int, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """The rule of visibility, term by term as `AttentionArgs` states it."""
    if args.mask_desc is not None:
        start, stop, q_offset, left, right, chunk = args.mask_desc[b, :6].tolist()
        start = max(start, 0)
    else:
        start = 0 if args.leftpad_k is None else int(args.leftpad_k[b])
        stop = num_keys if args.seqused_k is None else min(int(args.seqused_k[b]), num_keys)
        q_offset, left, right, chunk = stop - num_rows, args.window_left, args.window_right, args.chunk_size
    p = torch.arange(num_rows, device=args.q.device)[:, None] + q_offset
    j = torch.arange(num_keys, device=args.q.device)[None, :]
    visible = ((j >= start) & (j < stop)).expand(num_rows, num_keys)
    if left >= 0:
        visible = visible & (j >= p - left)
    if right >= 0:
        visible = visible & (j <= p + right)
    if chunk > 0:
        visible = visible & ((j - start) // chunk == (p - start) // chunk)
    if args.key_mask is not None:
        holes = args.key_mask[b, :num_keys]
        visible = visible & torch.cat([holes, holes.new_zeros(num_keys - holes.shape[0])])
    return visible, (p - j).abs()
