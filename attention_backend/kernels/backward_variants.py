"""Problem -> the compiled kernels of the generic backward: which defines, which tile. Knows no launch and no device."""

from functools import cache

import torch

from attention_backend.heuristics.sm80 import head_dim_tile
from attention_backend.jit.spec import KernelVariant


@cache
def preprocess_variant(dtype: torch.dtype, head_dim_v: int, arch: str) -> KernelVariant:
    lanes = 1 << (head_dim_tile(head_dim_v) // 8 - 1).bit_length()
    defines = (("BF16", int(dtype == torch.bfloat16)), ("LANES", lanes))
    return KernelVariant("flash_bwd_preprocess", arch, defines, hot=True)
