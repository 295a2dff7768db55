"""Block-sparse attention: the public function and its operators. Cost follows the listed blocks.

Served by the Hopper kernel on CUDA and by the exact reference on the CPU; the backward is the reference everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.block_lists import BLOCK, Lists
from attention_backend.block_sparsity import BlockSparsity
from attention_backend.checks import check_args, check_device
from attention_backend.errors import UnsupportedError
from attention_backend.interface import default_scale
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs
from attention_backend.reference import block_sparse_attention as reference

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BlockSparsity", "block_sparse_attention"]

_KERNEL = "flash_fwd_sm90"


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: BlockSparsity | BlockMask,
    *,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of what `sparsity` lists: q `[batch, seqlen_q, num_heads, head_dim]`, k, v `[batch, seqlen_k,
    num_kv_heads, *]` -> out `[batch, seqlen_q, num_heads, head_dim_v]`, with `return_lse` also lse `[batch, num_heads,
    seqlen_q]`. Differentiable in q, k and v. Rows that see nothing give 0 and an lse of -inf.

    Listed blocks are read whole: keys and values in them must be finite, seen or not. Unlisted blocks are not read. A
    FlexAttention BlockMask is converted at every call: convert it once by `BlockSparsity.from_block_mask`.

    Raises ValueError or TypeError for arguments that make no problem, UnsupportedError for one that nothing serves.
    """
    if not isinstance(sparsity, BlockSparsity):
        sparsity = BlockSparsity.from_block_mask(sparsity)
    scale = default_scale(softmax_scale, q)
    check_args(AttentionArgs(q, k, v, scale))
    _check_sparsity(q, k, sparsity)
    out, lse = block_sparse_attention_op(q, k, v, scale, *sparsity.lists)
    return (out, lse) if return_lse else out


def _check_sparsity(q: Tensor, k: Tensor, sparsity: BlockSparsity) -> None:
    lengths, wanted = (q.shape[1], k.shape[1]), (sparsity.seqlen_q, sparsity.seqlen_k)
    if lengths != wanted:
        raise ValueError(f"the sparsity is of {wanted[0]} x {wanted[1]}, q and k have {lengths[0]} x {lengths[1]}")
    batch, heads = sparsity.counts.shape[:2]
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[2]):
        raise ValueError(
            f"the sparsity has {batch} x {heads} lists, wanted 1 or {q.shape[0]} (batch) by 1 or {q.shape[2]} (heads)"
        )
    for name, x in zip(Lists._fields, sparsity.lists, strict=True):
        check_device(name, x, q.device)


@operator("block_sparse_attention")
def block_sparse_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    counts: Tensor,
    blocks: Tensor,
    bit_rows: Tensor,
    bits: Tensor,
) -> tuple[Tensor, Tensor]:
    """(out, lse); the arguments were checked by the public function."""
    lists = Lists(counts, blocks, bit_rows, bits)
    if q.device.type == "cpu":
        return reference.forward(q, k, v, softmax_scale, lists)
    args = AttentionArgs(q, k, v, softmax_scale)
    _refuse(args)
    from attention_backend.kernels import flash_fwd_sm90

    return flash_fwd_sm90.forward(args, BlockSparsity(*lists, q.shape[1], k.shape[1]))


def _refuse(args: AttentionArgs) -> None:
    """Raises UnsupportedError for what the kernel does not serve."""
    line = next(line for line in dispatch.TABLE if line.kernel == _KERNEL)
    reason = line.refuses(args)
    if reason is not None:
        raise UnsupportedError(
            f"no kernel serves this block-sparse call: {_KERNEL} serves {BLOCK} x {BLOCK} blocks of dense q, k and v "
            f"in bfloat16 or float16 on Hopper, but {reason}. The CPU serves every dtype. The exact reference runs "
            "anywhere: reference.block_sparse_attention.forward(q, k, v, softmax_scale, sparsity.lists)"
        )


@block_sparse_attention_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    args = AttentionArgs(q, k, v, 1.0)
    return q.new_empty(args.out_shape), q.new_empty(args.lse_shape, dtype=lse_dtype)


@operator("block_sparse_attention_backward")
def block_sparse_attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    counts: Tensor,
    blocks: Tensor,
    bit_rows: Tensor,
    bits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)"""
    lists = Lists(counts, blocks, bit_rows, bits)
    return reference.backward(q, k, v, out, lse, grad_out, grad_lse, softmax_scale, lists)


@block_sparse_attention_backward_op.register_fake
def _backward_fake(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor,  # noqa: ARG001
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


block_sparse_attention_backward_op.refuse_second_gradient()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.softmax_scale, *lists = inputs
    ctx.save_for_backward(*output, q, k, v, *lists)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, q, k, v, *lists = ctx.saved_tensors
    grads = block_sparse_attention_backward_op(grad_out, grad_lse, out, lse, q, k, v, ctx.softmax_scale, *lists)
    return (*grads, None, None, None, None, None)


block_sparse_attention_op.register_autograd(_backward, setup_context=_setup_context)
