"""The CPU's attention: exact, tiled as in FlashAttention-2 (Dao, 2023), memory linear in length, any option.

Plain torch, so it runs wherever torch does; what its fused kernel knows goes there. Reads lengths on
the host, so it does not belong in a CUDA graph.
"""

import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import decode, fused, tiles
from attention_backend.reference.gradients import Gradients, backward
from attention_backend.reference.groups import Group, groups

__all__ = ["Gradients", "backward", "forward"]


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out `args.out_shape` in q's dtype; lse `args.lse_shape` in float32 (float64 for float64 inputs)."""
    if args.dropout_threshold == 0 and decode.serves(args):
        return decode.forward(args)
    dtype = tiles.compute_dtype(args.dtype)
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=dtype)
    if args.cu_seqlens_q is not None:  # rows past the last sequence belong to nobody
        out.zero_()
        lse.fill_(-torch.inf)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    whole = fused.serves(args)
    for group in groups(args):
        if whole and fused.fits(args, group):
            group_out, group_lse = fused.attend(args, group)
            group.assign_q_rows(out, group_out)
            group.assign_lse_rows(lse, group_lse)
            continue
        num_rows = group.q.shape[1]
        for first in range(0, num_rows, tiles.TILE_ROWS):
            rows = slice(first, min(first + tiles.TILE_ROWS, num_rows))
            tile_out, tile_lse = _attend(args, group, rows)
            if rows.start == 0 and rows.stop == num_rows:
                group.assign_q_rows(out, tile_out)
                group.assign_lse_rows(lse, tile_lse)
            elif group.rows is None:
                out[group.sequences, rows] = tile_out.to(out.dtype)
                lse[group.sequences, :, rows] = tile_lse
            else:
                part = slice(group.rows.start + rows.start, group.rows.start + rows.stop)
                out[part] = tile_out[0].to(out.dtype)
                lse[:, part] = tile_lse[0]
    return out, lse


def _attend(args: AttentionArgs, group: Group, rows: slice) -> tuple[Tensor, Tensor]:
    """out `[n, R, num_heads, Dv]` and lse `[n, num_heads, R]` of some rows, in the compute dtype."""
    dtype = tiles.compute_dtype(args.dtype)
    num_rows, heads = rows.stop - rows.start, args.num_kv_heads
    q = tiles.head_rows(group.q[:, rows], heads).to(dtype) * args.softmax_scale
    n, _, _, head_rows, _ = q.shape
    row_max = q.new_full((n, heads, head_rows), -torch.inf)
    row_sum = q.new_zeros(n, heads, head_rows)
    acc = q.new_zeros(n, heads, head_rows, args.head_dim_v)
    start, stop, step = tiles.key_range(group, rows)
    for key in range(start, stop, step):
        block = tiles.key_block(args, group, key, min(key + step, stop), q.dtype)
        mask = tiles.visible(args, group, rows, block)
        s = tiles.scores(args, group, rows, q, block, mask, slope=False).scores.flatten(3, 4)
        new_max = torch.maximum(row_max, s.amax((1, 4)))
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)  # a row that has seen nothing: exp(-inf - 0) = 0
        p = s.sub_(shift[:, None, :, :, None]).exp_()
        decay = torch.exp(row_max - shift)
        row_sum = row_sum * decay + p.sum((1, 4))
        kept = tiles.kept(args, group, rows, block)
        if kept is not None:
            p.masked_fill_(~kept, 0.0)
        acc = acc * decay.unsqueeze(-1) + _weighted_values(p, block.v, mask)
        row_max = new_max
    lse = row_max + row_sum.log()
    out = acc / row_sum.masked_fill(row_sum == 0, 1.0).unsqueeze(-1)
    if args.sinks is not None:
        sinks = args.sinks.to(dtype).view(heads, -1, 1).expand(-1, -1, num_rows).reshape(heads, head_rows)
        empty = lse == -torch.inf
        with_sink = torch.logaddexp(lse, sinks).masked_fill(empty, -torch.inf)
        out = out * torch.exp(lse - with_sink).masked_fill(empty, 0.0).unsqueeze(-1)
        lse = with_sink
    if args.dropout_threshold:
        out = out * args.dropout_scale
    return tiles.from_head_rows(out, num_rows), lse.reshape(n, args.num_heads, num_rows)


def _weighted_values(p: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`[n, num_kv_heads, G * R, Dv]`. Slots that no row sees may hold NaN, and 0 * NaN is NaN: then again without."""
    product = torch.matmul(p, v)
    if mask is not None and not bool(product.isfinite().all()):
        seen = mask.any(4).squeeze(3).unsqueeze(-1)  # [n, P, 1, C, 1]
        product = torch.matmul(p, v.masked_fill(~seen, 0.0))
    return product.sum(1) if product.shape[1] > 1 else product.squeeze(1)
