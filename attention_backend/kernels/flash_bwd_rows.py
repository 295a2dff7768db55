"""Launches flash_bwd_preprocess: what a backward kernel knows of every query row before it starts.

The rows lie padded: `[num_heads, padded_rows]`, where sequence b begins at `(cu_seqlens_q[b] + b * 128) // 128 * 128`
(dense: `b * roundup(seqlen_q, 128)`), so that any tile of up to 128 rows may be read whole. Knows no main kernel.
"""

from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.backward_params import RowTermsParams
from attention_backend.kernels.backward_variants import preprocess_variant
from attention_backend.kernels.params import pointer
from attention_backend.problem import AttentionArgs

ROW_PADDING = 128  # parts/padded_rows.cuh
_THREADS = 256


@dataclass(frozen=True, slots=True)
class RowTerms:
    """float32 `[num_heads, padded_rows]` each: log2 of the softmax's denominator, and D = rowsum(dO * O) - dlse.

    Rows that see nothing, and rows of padding, have lse2 +inf and delta 0: `exp2(score - lse2)` is 0 for them.
    """

    lse2: Tensor
    delta: Tensor


def padded_rows(args: AttentionArgs) -> int:
    """A multiple of 128, from shapes alone."""
    if args.cu_seqlens_q is None:
        return args.batch * (-(-args.seqlen_q // ROW_PADDING) * ROW_PADDING)
    return (args.q.shape[0] + args.batch * ROW_PADDING) // ROW_PADDING * ROW_PADDING


def row_terms(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    zeroed: Tensor | None = None,
    counters: Tensor | None = None,
) -> RowTerms:
    """`out` and `lse` are forward's, `grad_out` is shaped like out with 16-byte aligned rows, `grad_lse` like lse.

    `zeroed`, float32 and contiguous, is set to 0 by the same launch: `[num_heads, padded_rows, width]`, or of dense
    sequences `[heads, padded_rows / batch, width]`, up to as many heads as all sequences have (width a multiple of 4).
    So are `counters`, int32, no more than all sequences have heads.
    """
    rows = padded_rows(args)
    terms = RowTerms(*args.q.new_empty((2, args.num_heads, rows), dtype=torch.float32).unbind())
    if rows == 0 or args.num_heads == 0:
        return terms
    lse = lse.contiguous()
    p = RowTermsParams(seqlen_q=args.seqlen_q, batch=args.batch, head_dim_v=args.head_dim_v, padded_rows=rows)
    p.num_heads = args.num_heads
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    p.cu_seqlens_q, p.out, p.grad_out = pointer(args.cu_seqlens_q), out.data_ptr(), grad_out.data_ptr()
    p.lse, p.grad_lse = lse.data_ptr(), pointer(grad_lse)
    p.lse2, p.delta, p.zeroed = terms.lse2.data_ptr(), terms.delta.data_ptr(), pointer(zeroed)
    p.out_row, p.out_head = out.stride(-3), out.stride(-2)
    p.grad_out_row, p.grad_out_head = grad_out.stride(-3), grad_out.stride(-2)
    p.lse_head = lse.stride(-2)
    if out.dim() == 4:
        p.out_batch, p.grad_out_batch, p.lse_batch = out.stride(0), grad_out.stride(0), lse.stride(0)
    if zeroed is not None:
        p.zeroed_head, p.zeroed_width = zeroed.shape[1:]
        together = zeroed.shape[1] == rows  # the sequences of a head
        p.zeroed_batch = rows // args.batch if together else args.num_heads * zeroed.shape[1]
        p.zeroed_heads = args.batch * args.num_heads if together and args.batch > 1 else zeroed.shape[0]
    if counters is not None:
        p.counters, p.num_counters = counters.data_ptr(), counters.numel()
    index = args.q.device.index
    kernel = load(preprocess_variant(args.dtype, args.head_dim_v, device.arch(index)), index)
    kernel((rows // ROW_PADDING * args.num_heads, 1, 1), (_THREADS, 1, 1), p)
    return terms


def sinks_gradient(sinks: Tensor, terms: RowTerms) -> Tensor:
    """`[num_heads]` in the sinks' dtype: -sum over rows of exp(sink - lse) * D. Sums in a fixed order."""
    share = torch.exp2(sinks.to(torch.float32).unsqueeze(1) * log2(e) - terms.lse2) * terms.delta
    return -share.sum(1).to(sinks.dtype)
