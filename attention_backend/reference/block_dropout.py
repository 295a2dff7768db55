"""Dropout whose mask is made again, never kept: a block's mask is a function of the saved state and its place."""

import torch
from torch import Tensor


def new_state() -> int:
    """The state R of FlashAttention's algorithms, drawn from torch's generator."""
    return int(torch.randint(2**31, ()))


def keep_scale(state: int, row: int, column: int, shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """Z of block (row, column): 1 / (1 - p) with probability 1 - p, else 0 (Algorithm 4, line 14)."""
    if p == 0.0:
        return like.new_ones(shape)
    seed = ((state * 1_000_003 + row) * 1_000_003 + column) % (2**63 - 1)  # a seed has 63 bits
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator, dtype=torch.float64) >= p
    return kept.to(device=like.device, dtype=like.dtype) / (1.0 - p)
