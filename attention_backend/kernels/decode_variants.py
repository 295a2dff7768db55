"""Problem -> the compiled decode and store kernels that serve it. Knows no launch and no device."""

from functools import cache

import torch

from attention_backend.heuristics.decode import DecodeConfig, decode_config
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.variants import Options


@cache
def decode_variant(options: Options, arch: str, rows: int) -> tuple[KernelVariant, DecodeConfig]:
    config = decode_config(arch, *options.tiles, rows)
    defines = (
        *options.defines(),
        ("EVEN", int(options.even)),
        ("NUM_WARPS", config.num_warps),
        ("ROWS", config.rows),
        ("STAGES", config.stages),
        ("MIN_BLOCKS", config.blocks_per_sm),
    )
    return KernelVariant("flash_decode", arch, defines, hot=not options.extras), config


@cache
def combine_variant(dtype: torch.dtype, arch: str) -> KernelVariant:
    return KernelVariant("flash_combine", arch, (("BF16", int(dtype == torch.bfloat16)),), hot=True)


@cache
def store_variant(dtype: torch.dtype, arch: str, rotary: int) -> KernelVariant:
    element = ("FP32", 1) if dtype == torch.float32 else ("BF16", int(dtype == torch.bfloat16))
    return KernelVariant("kv_cache_store", arch, (element, ("ROTARY", rotary)), hot=True)
