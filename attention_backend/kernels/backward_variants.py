"""Problem -> the compiled kernels of the generic backward: which defines, which tile. Knows no launch and no device."""

from functools import cache

import torch

from attention_backend.heuristics.sm80 import head_dim_tile
from attention_backend.heuristics.sm80_backward import BackwardConfig, backward_config
from attention_backend.jit.spec import KernelVariant, capability_of
from attention_backend.kernels.variants import Options


@cache
def preprocess_variant(dtype: torch.dtype, head_dim_v: int, arch: str) -> KernelVariant:
    lanes = 1 << (head_dim_tile(head_dim_v) // 8 - 1).bit_length()
    defines = (("BF16", int(dtype == torch.bfloat16)), ("LANES", lanes))
    return KernelVariant("flash_bwd_preprocess", arch, defines, hot=True)


@cache
def backward_variant(
    options: Options, arch: str, deterministic: bool, *, short: bool = False
) -> tuple[KernelVariant, BackwardConfig]:
    config = backward_config(arch, *options.tiles, short=short)
    unused = ("PAGED", "BIAS")  # no gradient goes through either
    defines = (
        *((name, value) for name, value in options.defines() if name not in unused),
        ("EVEN", int(options.even)),
        ("BLOCK_M", config.block_m),
        ("BLOCK_N", config.block_n),
        ("NUM_WARPS", config.num_warps),
        ("SCORE_WARPS_M", config.score_warps_m),
        ("SCORE_WARPS_N", config.score_warps_n),
        ("KEY_WARPS", config.key_warps),
        ("ROW_WARPS", config.row_warps),
        ("SPLIT", int(config.split)),
        ("STAGES", config.stages),
        ("MIN_BLOCKS", config.min_blocks),
        ("DETERMINISTIC", int(deterministic)),
    )
    hot = not options.extras and not deterministic
    return KernelVariant("flash_bwd_sm80", arch, defines, hot=hot), config


@cache
def postprocess_variant(dtype: torch.dtype, head_dim: int, arch: str) -> KernelVariant:
    defines = (
        ("BF16", int(dtype == torch.bfloat16)),
        ("HEAD_DIM", head_dim_tile(head_dim)),
        ("SCATTERED", int(capability_of(arch) < (9, 0))),
    )
    return KernelVariant("flash_bwd_postprocess", arch, defines, hot=True)
