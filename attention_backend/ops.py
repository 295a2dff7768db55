"""Attention as torch.library operators: fakes for the compiler, gradients for autograd, devices by dispatch.

Arguments are flat because a schema is; they were checked by the public functions and are not checked again.
"""

from typing import Any

import torch
from torch import Tensor

from attention_backend import backward, dispatch
from attention_backend.errors import UnsupportedError
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs

_FIELDS = AttentionArgs.__slots__  # the order of the operator's arguments


@operator("attention")
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    mask_desc: Tensor | None,
    key_mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int,
    window_right: int,
    chunk_size: int,
    softcap: float,
    num_splits: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`AttentionArgs`, field by field -> (out, lse)."""
    return dispatch.run(
        AttentionArgs(
            q, k, v, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k,
            block_table, mask_desc, key_mask, bias, alibi_slopes, sinks, window_left, window_right, chunk_size,
            softcap, num_splits, dropout_p, dropout_seed, k_scale, v_scale, deterministic,
        )
    )  # fmt: skip


@attention_op.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    args = AttentionArgs(q, k, v, *options)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(args.out_shape), q.new_empty(args.lse_shape, dtype=lse_dtype)


@operator("attention_backward")
def attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    mask_desc: Tensor | None,
    key_mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int,
    window_right: int,
    chunk_size: int,
    softcap: float,
    num_splits: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsinks), the last two empty where the problem has none."""
    args = AttentionArgs(
        q, k, v, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k,
        block_table, mask_desc, key_mask, bias, alibi_slopes, sinks, window_left, window_right, chunk_size,
        softcap, num_splits, dropout_p, dropout_seed, k_scale, v_scale, deterministic,
    )  # fmt: skip
    gradients = backward.run(args, out, lse, grad_out, grad_lse)
    dbias = q.new_empty(0) if gradients.dbias is None else gradients.dbias
    dsinks = q.new_empty(0) if gradients.dsinks is None else gradients.dsinks
    return gradients.dq, gradients.dk, gradients.dv, dbias, dsinks


@attention_backward_op.register_fake
def _attention_backward_fake(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    args = AttentionArgs(q, k, v, *options)
    dbias, dsinks = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (args.bias, args.sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias, dsinks


attention_backward_op.refuse_second_gradient()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)  # mostly nothing depends on lse


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if tensors[_FIELDS.index("k_scale")] is not None:
        raise UnsupportedError("float8 keys and values are for inference: attention over them has no gradient")
    inputs = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
    dq, dk, dv, dbias, dsinks = attention_backward_op(grad_out, grad_lse, out, lse, *inputs)
    found = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    needed = zip(_FIELDS, ctx.needs_input_grad, strict=True)
    return tuple(found.get(name) if need else None for name, need in needed)


attention_op.register_autograd(_backward, setup_context=_setup_context)
