"""Compiles what a model's steps will want, all at once, before a first step would meet one kernel after another."""

from collections.abc import Sequence

import torch

from attention_backend import jit
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.kernels import device as devices
from attention_backend.kernels.step_kernels import step_variants
from models.attention_sites import AttentionSite
from models.kv_pool import FP8

_HALVES = (torch.bfloat16, torch.float16)


def prepare_kernels(
    sites: Sequence[AttentionSite], dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int, device: torch.device
) -> int:
    """Returns how many kernels were compiled or found in the cache: none on a CPU, and none for float32, whose kernels
    are few. Raises CompileError for kernels that do not compile."""
    if device.type != "cuda" or dtype not in _HALVES:
        return 0
    arch = devices.arch(device.index or 0)
    variants = {
        variant: None
        for site in sites
        if max(site.head_dim, site.head_dim_v) <= HEAD_DIM_TILES[-1]  # wider ones are refused where they are called
        for variant in step_variants(
            arch,
            dtype,
            site.head_dim,
            site.head_dim_v,
            group=site.num_heads // site.num_kv_heads,
            page_size=block_size,
            softcap=site.softcap != 0.0,
            fp8_kv=kv_dtype == FP8,
        )
    }
    return len(jit.build_variants(variants, jit.default_cache()))
