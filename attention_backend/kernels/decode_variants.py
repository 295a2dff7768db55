"""Problem -> the compiled decode and store kernels that serve it. Knows no launch and no device."""

from functools import cache

import torch

from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.decode import (
    DecodeConfig,
    HopperDecodeConfig,
    decode_config,
    hopper_decode_config,
    hopper_page_rows,
)
from attention_backend.jit.spec import KernelVariant, capability_of
from attention_backend.kernels.variants import Options

#: The first compute capability that converts from e4m3.
FP8_FROM = (8, 9)


@cache
def decode_variant(
    options: Options, arch: str, rows: int, *, fp8_kv: bool = False
) -> tuple[KernelVariant, DecodeConfig]:
    """`rows`: query rows of a key head's group."""
    _require_fp8(arch, fp8_kv)
    config = decode_config(arch, *options.tiles, rows, 1 if fp8_kv else 2)
    defines = (
        *options.defines(),
        ("FP8_KV", int(fp8_kv)),
        ("EVEN", int(options.even)),
        ("NUM_WARPS", config.num_warps),
        ("ROWS", config.rows),
        ("STAGES", config.stages),
        ("MIN_BLOCKS", config.blocks_per_sm),
    )
    return KernelVariant("flash_decode", arch, defines, hot=not options.extras), config


@cache
def hopper_decode_variant(
    options: Options, rows: int, page_size: int, *, fp8_kv: bool = False
) -> tuple[KernelVariant, HopperDecodeConfig, int]:
    """`page_size`: 0 for dense keys. The last value is the keys of one copy."""
    config = hopper_decode_config(*options.tiles, rows, 1 if fp8_kv else 2)
    key_rows = (hopper_page_rows(page_size) or 0) if options.paged else config.keys
    defines = (
        *options.defines(),
        ("FP8_KV", int(fp8_kv)),
        ("NUM_WARPS", config.num_warps),
        ("ROWS", config.rows),
        ("STAGES", config.stages),
        ("MERGE_WIDTH", config.merge_width),
        ("PAGE_ROWS", key_rows),
        ("WHOLE_ROWS", int(copies_whole_rows(options, fp8_kv))),
    )
    return KernelVariant("flash_decode_sm90", "sm_90a", defines, hot=not options.extras), config, key_rows


def copies_whole_rows(options: Options, fp8_kv: bool) -> bool:
    """Whether a copy takes whole rows, contiguous where the cache is: only widths that are whole slabs of 64 can be
    given to the TMA as two dimensions."""
    return not fp8_kv and options.even and all(tile % 64 == 0 for tile in options.tiles)


@cache
def store_variant(dtype: torch.dtype, arch: str, rotary: int, *, fp8_kv: bool = False) -> KernelVariant:
    _require_fp8(arch, fp8_kv)
    element = ("FP32", 1) if dtype == torch.float32 else ("BF16", int(dtype == torch.bfloat16))
    return KernelVariant("kv_cache_store", arch, (element, ("ROTARY", rotary), ("FP8_KV", int(fp8_kv))), hot=True)


def _require_fp8(arch: str, fp8_kv: bool) -> None:
    if fp8_kv and capability_of(arch) < FP8_FROM:
        raise UnsupportedError(f"{arch} does not convert float8_e4m3fn: it needs sm_89")
