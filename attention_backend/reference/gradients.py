"""Backward of attention by tiles, probabilities recomputed from lse (FlashAttention, appendix B.4). Memory linear.

Plain torch: serves the CPU, and any device that has no backward kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import tiles
from attention_backend.reference.groups import Group, groups


@dataclass(frozen=True, slots=True)
class Gradients:
    """Shaped and typed like the tensors they belong to; None where the problem has no such tensor."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


@dataclass(frozen=True, slots=True)
class _Accumulators:
    """Sums over tiles, in the compute dtype."""

    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


def backward(
    args: AttentionArgs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None = None
) -> Gradients:
    """`out` and `lse` are forward's; `grad_out` is shaped like out, `grad_lse` like lse."""
    dtype = tiles.compute_dtype(args.dtype)
    dq = args.q.new_zeros(args.q.shape)
    sums = _Accumulators(
        torch.zeros(args.k.shape, dtype=dtype, device=args.k.device),
        torch.zeros(args.v.shape, dtype=dtype, device=args.v.device),
        None if args.bias is None else torch.zeros(args.bias.shape, dtype=dtype, device=args.q.device),
        None if args.sinks is None else torch.zeros(args.num_heads, dtype=dtype, device=args.q.device),
    )
    if out.numel():
        for group in groups(args):
            group.assign_q_rows(dq, _group_gradients(args, group, out, lse, grad_out, grad_lse, sums))
    return Gradients(
        dq,
        sums.dk.to(args.k.dtype),
        sums.dv.to(args.v.dtype),
        None if args.bias is None or sums.dbias is None else sums.dbias.to(args.bias.dtype),
        None if args.sinks is None or sums.dsinks is None else sums.dsinks.to(args.sinks.dtype),
    )


def _group_gradients(
    args: AttentionArgs,
    group: Group,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    sums: _Accumulators,
) -> Tensor:
    """dq of the group, `[n, rows, num_heads, D]`; everything else is added to `sums`."""
    dtype, heads = tiles.compute_dtype(args.dtype), args.num_kv_heads
    n, num_rows = group.q.shape[:2]
    group_out, group_grad, group_lse = group.q_rows(out), group.q_rows(grad_out), group.lse_rows(lse)
    dq = torch.empty(group.q.shape, dtype=dtype, device=group.q.device)
    for first in range(0, num_rows, tiles.TILE_ROWS):
        rows = slice(first, min(first + tiles.TILE_ROWS, num_rows))
        row_lse = group_lse[:, :, rows].to(dtype).reshape(n, 1, heads, -1, 1)  # [n, 1, Hkv, G * R, 1]
        dead = row_lse == -torch.inf  # rows that see nothing may hold NaN: they count as zero
        q = tiles.head_rows(group.q[:, rows], heads).to(dtype).masked_fill(dead, 0.0)
        do = tiles.head_rows(group_grad[:, rows], heads).to(dtype).masked_fill(dead, 0.0)
        row_out = tiles.head_rows(group_out[:, rows], heads).to(dtype)
        # D_i = do_i . o_i (appendix B.2, equation 4); lse's own gradient enters at the same place.
        delta = (do * row_out).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - group.lse_rows(grad_lse)[:, :, rows].to(dtype).reshape(row_lse.shape).masked_fill(dead, 0.0)
        row_lse = row_lse.masked_fill(dead, torch.inf)  # exp(s - inf) = 0
        if args.sinks is not None and sums.dsinks is not None:
            sinks = args.sinks.to(dtype).view(heads, -1, 1).expand(-1, -1, rows.stop - rows.start)
            share = torch.exp(sinks.reshape(1, 1, heads, -1, 1) - row_lse) * delta
            sums.dsinks.sub_(share.reshape(n, args.num_heads, -1).sum((0, 2)))
        dq_tile = _tile_gradients(args, group, rows, q, do, row_lse, delta, sums)
        dq[:, rows] = tiles.from_head_rows(dq_tile, rows.stop - rows.start)
    return dq


def _tile_gradients(
    args: AttentionArgs,
    group: Group,
    rows: slice,
    q: Tensor,
    do: Tensor,
    row_lse: Tensor,
    delta: Tensor,
    sums: _Accumulators,
) -> Tensor:
    """dq of some rows, `[n, num_kv_heads, G * R, D]`."""
    dq = torch.zeros_like(q).squeeze(1)
    scaled = q * args.softmax_scale
    start, stop, step = tiles.key_range(group, rows)
    for key in range(start, stop, step):
        block = tiles.key_block(args, group, key, min(key + step, stop), q.dtype)
        mask = tiles.visible(args, group, rows, block)
        if mask is not None:
            unseen = ~mask.any(4).squeeze(3).unsqueeze(-1)  # [n, P, 1, C, 1]; such slots may hold NaN
            block = tiles.KeyBlock(block.start, block.k.masked_fill(unseen, 0.0), block.v.masked_fill(unseen, 0.0))
        tile = tiles.scores(args, group, rows, scaled, block, mask, slope=True)
        p = torch.exp(tile.scores.flatten(3, 4) - row_lse)  # [n, P, Hkv, G * R, C]
        dp, dropped_p = torch.matmul(do, block.v.mT), p
        kept = tiles.kept(args, group, rows, block)
        if kept is not None:  # dropout acts on p after the softmax: on its gradient before the softmax's
            factor = kept.to(p.dtype) * args.dropout_scale
            dp, dropped_p = dp * factor, p * factor
        ds = p * (dp - delta)
        if sums.dbias is not None:
            _add_bias_gradient(group, rows, block, ds, sums.dbias)
        if tile.cap_slope is not None:
            ds = ds * tile.cap_slope.flatten(3, 4)
        dq += torch.matmul(ds, block.k).sum(1)
        _add_key_gradient(sums.dk, group, block, torch.matmul(ds.mT, scaled))
        _add_key_gradient(sums.dv, group, block, torch.matmul(dropped_p.mT, do))
    return dq * args.softmax_scale


def _add_bias_gradient(group: Group, rows: slice, block: tiles.KeyBlock, ds: Tensor, dbias: Tensor) -> None:
    """Sums ds over the dimensions that the bias broadcasts."""
    per_head = ds.squeeze(1).unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)  # [n, num_heads, R, C]
    broadcast = [d for d in range(3) if dbias.shape[d] == 1]
    if broadcast:
        per_head = per_head.sum(broadcast, keepdim=True)
    batch = group.sequences if dbias.shape[0] > 1 else slice(None)
    dbias[batch, :, rows if dbias.shape[2] > 1 else slice(None), block.start : block.stop] += per_head


def _add_key_gradient(total: Tensor, group: Group, block: tiles.KeyBlock, part: Tensor) -> None:
    """part `[n, P, num_kv_heads, C, D]`; several sequences may share a page."""
    if group.pages is not None:
        block_size = group.k.shape[1]
        pages = group.pages[:, block.start // block_size : block.stop // block_size]
        by_page = part.squeeze(1).unflatten(2, (pages.shape[1], block_size)).permute(0, 2, 3, 1, 4)
        total.index_add_(0, pages.flatten(), by_page.flatten(0, 1))
        return
    keys = part.squeeze(1).transpose(1, 2)  # [n, C, num_kv_heads, D]
    if group.keys is None:
        total[group.sequences, block.start : block.stop] += keys
    else:
        total[group.keys][block.start : block.stop] += keys[0]
