"""The layers around attention, fused: RMSNorm with its residual, rotary with the KV store, gated activations, linear.

On a GPU each is one kernel in bfloat16 and float16; in float32 and on a CPU they are plain torch. Both round where
Hugging Face's modules round. No gradients: UnsupportedError where autograd asks for one. Nothing waits for the device.
Knows no model.
"""

from typing import Any

import torch
from torch import Tensor

from attention_backend import paged_ops
from attention_backend.checks import check_device
from attention_backend.no_gradients import refuse_gradients
from attention_backend.operators import operator
from attention_backend.page_checks import check_pages, check_rotary_store
from attention_backend.reference import layers as reference

#: SiLU, GELU by its tanh approximation, GELU by erf.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
_CACHES = ("k_cache", "v_cache")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv 1910.07467); `unit_offset`: * (1 + weight) (Gemma).

    x `[rows, width]`, weight `[width]`; returns `[rows, width]`.
    """
    _check_norm(x, weight)
    refuse_gradients("rms_norm", x, weight)
    normed: Tensor = rms_norm_op(x, weight, eps, unit_offset)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), each `[rows, width]`."""
    _check_norm(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    check_device("residual", residual, x.device)
    refuse_gradients("add_rms_norm", x, residual, weight)
    normed, total = add_rms_norm_op(x, residual, weight, eps, unit_offset)
    return normed, total


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Turns queries and keys (RoFormer, arXiv 2104.09864, section 3.4.2, by halves) and writes keys and values to their
    pages. Returns the turned queries `[tokens, heads, head_dim]`, contiguous.

    q `[tokens, heads, head_dim]`, k, v `[tokens, kv_heads, head_dim]` (views of one packed projection serve), caches
    `[num_blocks, kv_heads, block_size, head_dim]`, slot_mapping int64 `[tokens]` (negative: not stored), cos, sin
    float32 `[tokens, rotary_dim / 2]`, rounded to q's dtype before use. With q_norm and k_norm `[head_dim]` each head
    goes through `rms_norm` first. Caches are of q's dtype, or float8_e4m3fn with scales (float32 `[kv_heads]`).

    Raises UnsupportedError on a GPU for sizes that `refuses` names, and for rows that are not 16-byte aligned.
    """
    check_rotary_store(q, k, v, k_cache, v_cache, slot_mapping, cos, sin)
    check_pages(q, k_cache, v_cache, k_scale, v_scale)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != q.shape[2:] or norm.dtype != q.dtype or not norm.is_contiguous()):
            raise ValueError(f"{name} must be {q.dtype} [{q.shape[2]}], got {norm.dtype} {tuple(norm.shape)}")
        if norm is not None:
            check_device(name, norm, q.device)
    refuse_gradients("rotary_store", q, k, v, k_cache, v_cache, cos, sin, q_norm, k_norm, k_scale, v_scale)
    turned: Tensor = rotary_store_op(
        q, k, v, k_cache, v_cache, slot_mapping, cos, sin, q_norm, k_norm, eps, unit_offset, k_scale, v_scale
    )
    return turned


def refuses(*, width: int, gated_width: int, head_dim: int, rotary_dim: int) -> str | None:
    """Why there are no kernels for layers of these sizes (of a row, of a gated activation's row, of a head), in words;
    None: there are."""
    from attention_backend.kernels import gated_activation, rms_norm, rotary_store

    reasons = (
        rms_norm.refuses(width),
        gated_activation.refuses(gated_width),
        rotary_store.refuses(head_dim, rotary_dim),
    )
    return next((reason for reason in reasons if reason is not None), None)


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up (Shazeer, arXiv 2002.05202), each `[rows, width]`; `activation` is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be [rows, width] of one dtype")
    check_device("up", up, gate.device)
    refuse_gradients("gated_activation", gate, up)
    out: Tensor = gated_activation_op(gate, up, activation)
    return out


def _by_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _KERNEL_DTYPES


def _early() -> bool:
    """In CUDA graphs kernels may start early: the weights, which they read then, are constants there."""
    return torch.cuda.is_current_stream_capturing()


@operator("rms_norm")
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """See `rms_norm`."""
    if _by_kernel(x):
        from attention_backend.kernels import rms_norm as kernel

        return kernel.rms_norm(x, None, weight, eps, unit_offset=unit_offset, early=_early())[0]
    return reference.rms_norm(x, weight, eps, unit_offset)


@rms_norm_op.register_fake
def _rms_norm_fake(x: Tensor, *options: Any) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@operator("add_rms_norm")
def add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """See `add_rms_norm`."""
    if _by_kernel(x):
        from attention_backend.kernels import rms_norm as kernel

        return kernel.rms_norm(x, residual, weight, eps, unit_offset=unit_offset, early=_early())
    total = residual + x
    return reference.rms_norm(total, weight, eps, unit_offset), total


@add_rms_norm_op.register_fake
def _add_rms_norm_fake(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator("rotary_store", mutates_args=_CACHES)
def rotary_store_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    unit_offset: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """See `rotary_store`."""
    if _by_kernel(q):
        from attention_backend.kernels import rotary_store as kernel

        return kernel.rotary_store(
            q, k, v, k_cache, v_cache, slot_mapping, cos, sin, q_norm, k_norm, eps,
            unit_offset=unit_offset, k_scale=k_scale, v_scale=v_scale, early=_early(),
        )  # fmt: skip
    if not q.is_cuda:
        return reference.rotary_store(
            q, k, v, k_cache, v_cache, slot_mapping, cos, sin, q_norm, k_norm, eps, unit_offset, k_scale, v_scale
        )
    q, k = reference.rotate(q, k, cos, sin, q_norm, k_norm, eps, unit_offset)
    paged_ops.store_kv_op(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


@rotary_store_op.register_fake
def _rotary_store_fake(q: Tensor, *others: Any) -> Tensor:  # noqa: ARG001
    return q.new_empty(q.shape)


@operator("gated_activation")
def gated_activation_op(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See `gated_activation`."""
    if _by_kernel(gate):
        from attention_backend.kernels import gated_activation as kernel

        return kernel.gated_activation(gate, up, activation, early=_early())
    return reference.gated_activation(gate, up, activation)


@gated_activation_op.register_fake
def _gated_activation_fake(gate: Tensor, *others: Any) -> Tensor:  # noqa: ARG001
    return gate.new_empty(gate.shape)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x must be [rows, width] and weight [width], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype}, its weight {weight.dtype}")
    check_device("weight", weight, x.device)
