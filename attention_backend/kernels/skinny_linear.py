"""Launches skinny_linear: few rows times a weight, at the speed of reading the weight.

Knows which configuration a weight gets; assumes that shapes were checked.
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.skinny import (
    COLUMNS,
    STEP,
    TILE_ROWS,
    WARPS,
    SkinnyConfig,
    skinny_config,
    skinny_configs,
)
from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.params import pointer

_PIECE = WARPS * 2 * STEP * 2  # bytes of a row that are a line of every warp


class SkinnyParams(ctypes.Structure):
    """skinny_linear.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, c_int64) for name in ("x_row", "weight_row", "out_row")),
        *((name, c_int) for name in ("m", "n", "k", "tiles_each", "tiles_more", "prefetch")),
    )


@cache
def skinny_variant(dtype: torch.dtype, columns: int, config: SkinnyConfig, arch: str) -> KernelVariant:
    defines = (
        ("BF16", int(dtype == torch.bfloat16)),
        ("COLUMNS", columns),
        ("GROUP", config.group),
        ("MIN_BLOCKS", config.blocks_per_sm),
        ("RING", config.ring),
        ("SLOTS", config.slots),
        ("TILES", config.tiles),
        ("WARPS", WARPS),
    )
    return KernelVariant("skinny_linear", arch, defines, hot=True)


def covering_set(arch: str) -> Iterator[KernelVariant]:
    """What calls select: both dtypes (Turing has no bfloat16)."""
    for dtype in (torch.float16,) if arch == "sm_75" else (torch.bfloat16, torch.float16):
        for columns in COLUMNS:
            for config in skinny_configs(arch, columns):
                yield skinny_variant(dtype, columns, config, arch)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, early: bool = False, config: SkinnyConfig | None = None
) -> Tensor:
    """x `[m, k]` times weight `[n, k]`, plus bias `[n]` -> `[m, n]`; m up to 16.

    `early`: the kernel may start before the previous one has ended, and reads the weight then. `config` is for
    measuring: the heuristics choose otherwise.
    """
    m, n, k = x.shape[0], weight.shape[0], x.shape[1]
    out = x.new_empty((m, n))
    if m == 0 or n == 0:
        return out
    index = x.device.index
    columns = next(columns for columns in COLUMNS if m <= columns)
    arch, sms = device.arch(index), device.num_sms(index)
    config = config or skinny_config(arch, n, columns, sms)
    p = SkinnyParams(x=x.data_ptr(), weight=weight.data_ptr(), bias=pointer(bias), out=out.data_ptr())
    p.x_row, p.weight_row, p.out_row = x.stride(0), weight.stride(0), n
    p.m, p.n, p.k = m, n, k
    p.prefetch = config.prefetch // _PIECE if early else 0
    tiles = -(-n // TILE_ROWS)
    blocks = min(sms, tiles)
    p.tiles_each, p.tiles_more = divmod(tiles, blocks)
    kernel = load(skinny_variant(x.dtype, columns, config, arch), index)
    kernel((blocks, 1, 1), (32 * WARPS, 1, 1), p, config.smem_bytes(columns), early=early)
    return out
