"""The public function of linear attention, its operator `longwave::linear_attention`, and its gradient.

Knows which device computes what; the mathematics is in reference.linear, the kernels are kernels.linear_attention.
"""

from typing import Any, cast

from torch import Tensor

from attention_backend.checks import check_device, check_int, check_is_tensor
from attention_backend.operators import operator
from attention_backend.reference import linear as reference
from attention_backend.reference.linear import FEATURE_MAPS, FeatureMap

__all__ = ["FeatureMap", "linear_attention"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
    chunk_size: int = reference.CHUNK,
) -> Tensor:
    """out_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j), over all keys or (causal) j <= i.

    q `[batch, seqlen_q, num_heads, head_dim]`, k and v `[batch, seqlen_k, num_kv_heads, *]` -> `[batch, seqlen_q,
    num_heads, head_dim of v]`. phi is elu(x) + 1 ("elu"), relu(x) ("relu") or x itself ("none": q and k are features
    already). Without `normalize` there is no denominator; a row whose denominator is 0 gives 0. Differentiable.

    Time and memory are linear in length (https://arxiv.org/abs/2006.16236). `chunk_size` rows at a time are computed by
    the causal CPU path and gradient; the kernels have their own. On a GPU: bfloat16 and float16, one head_dim for all,
    16 to 128 by 16. Raises ValueError and TypeError for arguments that make no problem, UnsupportedError for one that
    the kernels do not serve.
    """
    _check(q, k, v, causal, feature_map, chunk_size)
    return _op(q, k, v, causal, feature_map, normalize, chunk_size)


@operator("linear_attention")
def _op(q: Tensor, k: Tensor, v: Tensor, causal: bool, feature_map: str, normalize: bool, chunk_size: int) -> Tensor:
    chosen = cast(FeatureMap, feature_map)
    if q.device.type == "cuda":
        from attention_backend.kernels import linear_attention as kernels

        return kernels.forward(q, k, v, causal=causal, feature_map=chosen, normalize=normalize)
    return reference.forward(
        q, k, v, causal=causal, feature_map=chosen, normalize=normalize, chunk_size=chunk_size
    ).contiguous()


@_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:  # noqa: ARG001
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@operator("linear_attention_backward")
def _backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    feature_map: str,
    normalize: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch on every device, from the inputs alone."""
    chosen = cast(FeatureMap, feature_map)
    dq, dk, dv = reference.backward(
        grad_out, q, k, v, causal=causal, feature_map=chosen, normalize=normalize, chunk_size=chunk_size
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward_op.register_fake
def _backward_fake(
    grad_out: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_backward_op.refuse_second_gradient()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward_op(grad_out, *ctx.saved_tensors, *ctx.options)
    needed = zip(gradients, ctx.needs_input_grad[:3], strict=True)
    return (*(x if need else None for x, need in needed), *(None for _ in ctx.options))


_op.register_autograd(_backward, setup_context=_setup_context)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, feature_map: str, chunk_size: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, seqlen, heads, head_dim], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or not x.dtype.is_floating_point or x.itemsize == 1:
            wanted = "q, k and v must have one floating point dtype of 16 bits or more"
            raise TypeError(f"{wanted}, got q {q.dtype} and {name} {x.dtype}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {x.stride()}")
        check_device(name, x, q.device)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {q.shape[2]} and {k.shape[2]}")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal linear attention is of one length, got {q.shape[1]} rows and {k.shape[1]} keys")
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}")
    check_int("chunk_size", chunk_size)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
