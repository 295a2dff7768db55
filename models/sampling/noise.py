"""Noise that is a pure function of (seed, position, vocabulary index), so no batch, chunk or preemption can change it.

A counter-based hash (splitmix64 for the row's key, murmur3's finaliser over the vocabulary) drives an exponential race:
argmax(log p_i - log E_i), E_i ~ Exp(1), draws i with probability p_i (the Gumbel-max trick written with exponentials).
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MASK16 = 0xFFFF
_MASK19 = 0x7_FFFF
_MASK31 = 0x7FFF_FFFF


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One 64-bit key per row as two int32 words, `[num_rows, 2]`."""
    counter = positions.astype(np.uint64) * _GOLDEN  # wraps, as meant
    key = _splitmix64(_splitmix64(seeds) ^ counter)
    return key[:, None].view(np.int32)


def log_exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """log E for E ~ Exp(1), float32 `[num_rows, vocab_size]`. keys: int32 `[num_rows, 2]`."""
    index = torch.arange(vocab_size, dtype=torch.int32, device=keys.device).mul_(_signed(0x9E37_79B1))
    bits = _mix32(index ^ keys[:, :1])
    bits = _mix32(bits.bitwise_xor_(keys[:, 1:]))
    # Small uniforms keep their full precision: they decide the race. The clamp keeps 1 - u from rounding to 0.
    uniform = bits.bitwise_and_(_MASK31).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser, in place. torch shifts int32 arithmetically: the masks make the shifts logical."""
    x.bitwise_xor_((x >> 16).bitwise_and_(_MASK16)).mul_(_signed(0x85EB_CA6B))
    x.bitwise_xor_((x >> 13).bitwise_and_(_MASK19)).mul_(_signed(0xC2B2_AE35))
    return x.bitwise_xor_((x >> 16).bitwise_and_(_MASK16))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
