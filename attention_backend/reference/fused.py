"""torch's own fused attention of a CPU (FlashAttention-2 in C++), for what it knows: rows that all see the same keys,
and the causal square where a sequence ends. What is put together from these is attention here; `cpu` does the rest."""

import torch
from torch import Tensor

from attention_backend.problem import UNBOUNDED, AttentionArgs
from attention_backend.reference import tiles
from attention_backend.reference.groups import Group
from attention_backend.reference.merge import merge_states

#: Elements of keys and values that are copied out of pages at a time.
_MAX_COPIED = 1 << 22


def knows(args: AttentionArgs) -> bool:
    """Whether scores are those of plain attention, in a dtype of the kernel: then only who sees what is in question."""
    return (
        args.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and args.k.dtype == args.v.dtype == args.dtype
        and args.head_dim == args.head_dim_v
        and args.softcap == 0.0
        and args.bias is None
        and args.alibi_slopes is None
        and args.dropout_threshold == 0
    )


def serves(args: AttentionArgs) -> bool:
    """Whether every row sees all keys of its sequence, or all up to its own."""
    return (
        knows(args)
        and args.mask_desc is None
        and args.key_mask is None
        and args.leftpad_k is None
        and args.window_left == UNBOUNDED
        # torch masks the square before it multiplies by the scale: -inf would become NaN, or inf.
        and (args.window_right == UNBOUNDED or (args.window_right == 0 and args.softmax_scale > 0))
        and args.chunk_size == 0
    )


def fits(args: AttentionArgs, group: Group) -> bool:
    """Whether a group's sequences are of one length, and its rows among its keys."""
    ends, rows = group.high[:, -1], group.q.shape[1]
    end = int(ends[0])
    return end >= (rows if args.window_right == 0 else 1) and bool((ends == end).all())


def attend(args: AttentionArgs, group: Group) -> tuple[Tensor, Tensor]:
    """out `[n, rows, num_heads, Dv]` and lse `[n, num_heads, rows]` in float32, of a group that `fits`."""
    q, end = group.q.transpose(1, 2), int(group.high[0, -1])
    start = end - q.shape[2] if args.window_right == 0 else end  # of the square, where there is one
    state: tuple[Tensor, Tensor] | None = None
    for first, last in [*_blocks(group, start), (start, end)]:
        if first == last:
            continue
        block = tiles.key_block(args, group, first - first % _page(group), last, args.dtype)
        k, v = (x.squeeze(1)[:, :, first - block.start : last - block.start] for x in (block.k, block.v))
        out, lse = attention(q, k, v, args.softmax_scale, causal=first == start)
        out = out.transpose(1, 2)
        if state is not None:  # in float32, so that many blocks round once
            out, lse = merge_states([state[0].float(), out.float()], [state[1], lse])
        state = out, lse
    assert state is not None
    return state if args.sinks is None else merge_states([state[0]], [state[1]], args.sinks)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q `[n, num_heads, rows, D]`, k, v `[n, num_kv_heads, keys, D]`, bias `[n, 1, 1, keys]` -> out like q, and lse
    `[n, num_heads, rows]` in float32. `causal`: there are as many keys as rows. Every row sees a key."""
    if 0 < q.stride(2) < q.shape[3]:  # rows that overlap, which the kernel does not expect
        q = q.contiguous()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _page(group: Group) -> int:
    return 1 if group.pages is None else group.k.shape[1]


def _blocks(group: Group, stop: int) -> list[tuple[int, int]]:
    """The keys before the square; those in pages at most _MAX_COPIED elements at a time, each from a page's start."""
    if group.pages is None:
        return [(0, stop)]
    n, width = group.q.shape[0], group.k.shape[2] * (group.k.shape[3] + group.v.shape[3])
    page = _page(group)
    step = max(1, _MAX_COPIED // (n * width) // page) * page
    return [(first, min(first + step, stop)) for first in range(0, stop, step)]
