"""Rotary position embedding (RoFormer, https://arxiv.org/abs/2104.09864) with FlashAttention's arguments."""

import torch
from torch import Tensor


def apply(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first rotary_dim elements of every head of x by the angle of its position; x is not changed.

    x `[..., heads, D]`, positions integer `[...]`, cos and sin `[seqlen_ro, rotary_dim / 2]`. `interleaved` pairs
    elements (0, 1), (2, 3), ... (GPT-J); otherwise element i with i + rotary_dim / 2 (GPT-NeoX).
    """
    half = cos.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions.long()].to(dtype).unsqueeze(-2) for table in (cos, sin))  # [..., 1, rotary_dim / 2]
    head = x[..., : 2 * half].to(dtype)
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    rotated = (first * c - second * s, second * c + first * s)
    turned = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)
