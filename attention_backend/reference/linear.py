"""Linear attention (Katharopoulos et al., https://arxiv.org/abs/2006.16236): the softmax gives way to a product of
features, so phi(Q) (phi(K)^T V) needs no score matrix. Plain torch, any device; time and memory linear in length.

q `[batch, seqlen_q, num_heads, D]`, k `[batch, seqlen_k, num_kv_heads, D]`, v like k with its own last dimension.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.reference.tiles import compute_dtype

FeatureMap = Literal["elu", "relu", "none"]
FEATURE_MAPS: tuple[FeatureMap, ...] = get_args(FeatureMap)
CHUNK = 64


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
    chunk_size: int = CHUNK,
) -> Tensor:
    """out_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j), over all j or (causal) j <= i.

    Without `normalize` there is no denominator. A row whose denominator is 0 gives 0. Computed in float32 (float64 for
    float64) and returned in q's dtype; differentiable by autograd.
    """
    phi_q, phi_k, values = _split(q, k, v, feature_map)
    if normalize:  # a column of ones beside v: its weighted sum is the denominator
        values = F.pad(values, (0, 1), value=1.0)
    out = _weighted(phi_q, phi_k, values, causal, chunk_size)
    if normalize:
        out = _divided(out[..., :-1], out[..., -1:])
    return _joined(out).to(q.dtype)


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
) -> Tensor:
    """The same by the whole matrix of weights, as the definition says it."""
    phi_q, phi_k, values = _split(q, k, v, feature_map)
    weights = phi_q @ phi_k.mT
    if causal:
        weights = weights.tril()
    out = weights @ values
    if normalize:
        out = _divided(out, weights.sum(-1, keepdim=True))
    return _joined(out).to(q.dtype)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    feature_map: FeatureMap,
    normalize: bool,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). The numerator and the denominator are computed again; each gradient is a linear attention itself:
    with w_ij = a_i . b_j and y_i = sum_j w_ij c_j, da_i = sum_j (dy_i . c_j) b_j, and so on, keys' from the right."""
    phi_q, phi_k, values = _split(q, k, v, feature_map)
    grad = _heads(grad_out, k.shape[2]).to(values.dtype)
    if normalize:
        values = F.pad(values, (0, 1), value=1.0)
        out = _weighted(phi_q, phi_k, values, causal, chunk_size)
        denominator = out[..., -1:]
        grad = _divided(grad, denominator)
        grad = torch.cat([grad, -_divided((grad * out[..., :-1]).sum(-1, keepdim=True), denominator)], -1)
    grad_q = _weighted(grad, values, phi_k, causal, chunk_size) * _slope(phi_q, feature_map)
    turn = (lambda x: x.flip(-2)) if causal else (lambda x: x)  # key j is seen by the rows from j on: right to left
    seen = turn(grad), turn(values), turn(phi_q), turn(phi_k)
    grad_k = turn(_weighted(seen[1], seen[0], seen[2], causal, chunk_size)) * _slope(phi_k, feature_map)
    grad_v = turn(_weighted(seen[3], seen[2], seen[0], causal, chunk_size))[..., : v.shape[-1]]
    dk, dv = (_joined(x.sum(2, keepdim=True)).to(k.dtype) for x in (grad_k, grad_v))  # over the heads of a group
    return _joined(grad_q).to(q.dtype), dk, dv


def features(x: Tensor, feature_map: FeatureMap) -> Tensor:
    """phi, element by element: elu(x) + 1 (positive everywhere), relu(x), or x, which then is features already."""
    if feature_map == "elu":
        return F.elu(x) + 1
    return F.relu(x) if feature_map == "relu" else x


def _slope(phi: Tensor, feature_map: FeatureMap) -> Tensor | float:
    """phi'(x) from phi(x): exp(x) = phi for a negative x of elu."""
    if feature_map == "elu":
        return phi.clamp(max=1.0)
    return (phi > 0).to(phi.dtype) if feature_map == "relu" else 1.0


def _split(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q) `[batch, num_kv_heads, group, N, D]`, phi(k) and v with a group of 1, in the compute dtype."""
    dtype = compute_dtype(q.dtype)
    kv_heads = k.shape[2]
    phi_q, phi_k = (features(_heads(x, kv_heads).to(dtype), feature_map) for x in (q, k))
    return phi_q, phi_k, _heads(v, kv_heads).to(dtype)


def _heads(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(2, (kv_heads, x.shape[2] // kv_heads)).permute(0, 2, 3, 1, 4)


def _joined(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _weighted(a: Tensor, b: Tensor, c: Tensor, causal: bool, chunk_size: int) -> Tensor:
    """y_i = sum_j (a_i . b_j) c_j; a, b `[..., N, D]`, c `[..., N, E]`. Causal: a chunk of rows at a time, with the sum
    of b_j c_j^T over all earlier keys, `[..., D, E]`, as the running state."""
    if not causal:
        return a @ (b.mT @ c)
    parts = []
    state: Tensor | None = None
    for rows, keys, values in zip(*(x.split(chunk_size, -2) for x in (a, b, c)), strict=True):
        part = (rows @ keys.mT).tril() @ values
        parts.append(part if state is None else part + rows @ state)
        new = keys.mT @ values
        state = new if state is None else state + new
    return torch.cat(parts, -2)


def _divided(x: Tensor, by: Tensor) -> Tensor:
    empty = by == 0
    return (x / by.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
