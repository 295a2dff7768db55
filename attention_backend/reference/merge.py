"""Softmax states of the same query rows, each over other keys, merged into one: plain torch, on any device.

out = sum_s e^(lse_s - lse) out_s,  lse = log(sum_s e^lse_s + e^sink)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_backend.reference.tiles import compute_dtype


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out in the dtype of `outs`, lse in float32, or in float64 if `outs` are).

    outs `[rows, num_heads, head_dim]` with lses `[num_heads, rows]`, or outs `[batch, rows, num_heads, head_dim]` with
    lses `[batch, num_heads, rows]`. A state that saw nothing has lse -inf, and its out may hold anything. Where all saw
    nothing, out is 0 and lse -inf, with sinks too.
    """
    dtype = compute_dtype(outs[0].dtype)
    stacked = torch.stack([lse.to(dtype) for lse in lses])
    seen = stacked.logsumexp(0)
    empty = seen == -torch.inf
    lse = seen if sinks is None else torch.logaddexp(seen, sinks.to(dtype).unsqueeze(-1)).masked_fill(empty, -torch.inf)
    weights = (stacked - lse.masked_fill(empty, 0.0)).exp().transpose(-1, -2).unsqueeze(-1)
    out = torch.zeros_like(outs[0], dtype=dtype)
    for weight, state in zip(weights, outs, strict=True):
        out += torch.where(weight == 0, 0.0, weight * state.to(dtype))  # 0 * NaN is NaN
    return out.to(outs[0].dtype), lse
