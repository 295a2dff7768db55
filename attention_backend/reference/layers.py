"""The layers around attention in plain torch, rounded where Hugging Face's modules round. Knows no device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend.reference import kv_cache


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """x `[..., width]`, weight `[width]`; `unit_offset`: 1 + weight, rounded once (Gemma)."""
    normed = F.rms_norm(x.float(), weight.shape, None, eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[tokens, heads, head_dim]`, its first elements turned by halves; cos, sin `[tokens, rotary_dim / 2]`."""
    half = cos.shape[-1]
    c, s = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * c - second * s, second * c + first * s)
    return torch.cat(turned if 2 * half == x.shape[-1] else (*turned, x[..., 2 * half :]), -1)


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed if there are norms, then turned; see `attention_backend.layers.rotary_store`."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, unit_offset), rms_norm(k, k_norm, eps, unit_offset)
    together = _together(q, k)
    if together is None:
        return rotated(q, cos, sin), rotated(k, cos, sin)
    turned = rotated(together, cos, sin)
    return turned[:, : q.shape[1]].contiguous(), turned[:, q.shape[1] :]


def _together(q: Tensor, k: Tensor) -> Tensor | None:
    """The heads of both as one tensor, where they follow each other in memory, as those of one projection do."""
    (tokens, heads, dim), (row, head, _) = q.shape, q.stride()
    follows = k.data_ptr() == q.data_ptr() + heads * head * q.itemsize and k.stride()[1:] == q.stride()[1:]
    if (
        not follows
        or (tokens > 1 and k.stride(0) != row)
        or k.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    ):
        return None
    return q.as_strided((tokens, heads + k.shape[1], dim), q.stride())


def rotary_store(
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
    """See `attention_backend.layers.rotary_store`."""
    q, k = rotate(q, k, cos, sin, q_norm, k_norm, eps, unit_offset)
    kv_cache.store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
