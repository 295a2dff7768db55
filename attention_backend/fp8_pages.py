"""Attention over float8 pages, also where the kernel that serves the problem reads none: then over a copy in q's dtype.

That is what no decode kernel serves on a GPU that is no Hopper, and on one long chunks: those do so much with every key
that the copy is some percent of their time, no more than reading float8 costs. A short one, deep in a context, would be
half copying: whoever cuts prompts must count it. Knows no step and waits for no device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.sm90 import FEW_FP8_ROWS
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs

#: A copy of several sequences' pages takes no more than this; one sequence's takes what it takes.
COPY_BYTES = 1 << 30


def attention(args: AttentionArgs) -> Tensor:
    """out `args.out_shape` of a paged problem with scales. Raises UnsupportedError for what no kernel serves."""
    if not is_copied(args):
        return dispatch.run(args)[0]
    assert args.block_table is not None
    at_once = max(1, pages_at_once(args) // max(1, args.block_table.shape[1]))
    out: Tensor | None = None
    for first in range(0, args.batch, at_once):
        some = _over_copies(_sequences(args, slice(first, first + at_once)))
        if out is None:
            out = some
        elif args.cu_seqlens_q is None:
            out = torch.cat((out, some))
        else:  # a part leaves undefined what belongs to other sequences
            rows = torch.arange(some.shape[0], device=some.device) >= args.cu_seqlens_q[first]
            out = torch.where(rows[:, None, None], some, out)
    return args.q.new_zeros(args.out_shape) if out is None else out


def pages_at_once(args: AttentionArgs) -> int:
    """How many pages of several sequences are copied at once; one sequence's are, however many it has."""
    page_bytes = args.k.shape[1] * args.num_kv_heads * (args.head_dim + args.head_dim_v) * args.dtype.itemsize
    return COPY_BYTES // page_bytes


def kernel(args: AttentionArgs) -> str:
    """What serves a paged problem with scales, by name. Raises UnsupportedError when nothing does."""
    if not is_copied(args):
        return dispatch.select(args).kernel
    # What is copied is contiguous, and of q's dtype.
    k, v = (args.q.new_empty((1, *x.shape[1:])) for x in (args.k, args.v))
    return f"dequantize_pages + {dispatch.select(replace(args, k=k, v=v, k_scale=None, v_scale=None)).kernel}"


def is_copied(args: AttentionArgs) -> bool:
    """Whether no kernel serves a paged problem with scales as it is, or one for which the copy is worth its time."""
    try:
        kernel = dispatch.select(args).kernel
    except UnsupportedError:
        return True
    return kernel == "flash_fwd_sm90" and args.seqlen_q > FEW_FP8_ROWS


def _sequences(args: AttentionArgs, part: slice) -> AttentionArgs:
    assert args.block_table is not None
    assert args.seqused_k is not None
    dense, bounds = args.cu_seqlens_q is None, slice(part.start, part.stop + 1)
    return replace(
        args,
        q=args.q[part] if dense else args.q,
        cu_seqlens_q=None if args.cu_seqlens_q is None else args.cu_seqlens_q[bounds],
        seqused_k=args.seqused_k[part],
        block_table=args.block_table[part],
    )


def _over_copies(args: AttentionArgs) -> Tensor:
    assert args.block_table is not None
    batch, width = args.block_table.shape
    k, v = dequantize_pages_op(
        args.k.transpose(1, 2), args.v.transpose(1, 2), args.k_scale, args.v_scale, args.block_table, args.seqused_k,
        args.cu_seqlens_q, args.seqlen_q, args.window_left, args.dtype,
    )  # fmt: skip
    table = torch.arange(batch * width, dtype=torch.int32, device=args.q.device).view(batch, width)
    copied = replace(args, k=k.transpose(1, 2), v=v.transpose(1, 2), k_scale=None, v_scale=None, block_table=table)
    return dispatch.run(copied)[0]


@operator("dequantize_pages")
def dequantize_pages_op(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    seqlen_q: int,
    window_left: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Caches `[num_blocks, heads, page_size, *]` of float8, times their heads' scales, as caches of `dtype`.

    Page j of sequence b, `block_table[b, j]`, becomes page `b * block_table.shape[1] + j`. Pages past `seq_lens[b]`, or
    before what the first of the sequence's rows (its last keys') sees through the window, hold anything.
    """
    batch, width = block_table.shape
    shapes = ((batch * width, *cache.shape[1:]) for cache in (k_cache, v_cache))
    if k_cache.is_cuda:
        from attention_backend.kernels import dequantize_pages

        k, v = (torch.empty(shape, dtype=dtype, device=k_cache.device) for shape in shapes)
        dequantize_pages.dequantize(
            k_cache, v_cache, k_scale, v_scale, block_table, seq_lens, cu_seqlens_q, seqlen_q, window_left, k, v
        )
        return k, v
    pages = block_table.flatten().long().clamp(0, k_cache.shape[0] - 1)
    k, v = (
        # Indexing knows no float8: bytes are bytes.
        (cache.view(torch.uint8)[pages].view(cache.dtype).float() * scale[:, None, None]).to(dtype)
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
    )
    return k, v


@dequantize_pages_op.register_fake
def _dequantize_fake(k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    table, dtype = options[2], options[-1]
    assert isinstance(table, Tensor)
    assert isinstance(dtype, torch.dtype)
    pages = table.shape[0] * table.shape[1]
    k, v = (cache.new_empty((pages, *cache.shape[1:]), dtype=dtype) for cache in (k_cache, v_cache))
    return k, v
