"""Problem -> the compiled kernel that serves it: which defines, which tile. Knows no launch and no device."""

from functools import cache
from typing import NamedTuple

import torch

from attention_backend.heuristics.sm80 import (
    Float32Config,
    ForwardConfig,
    float32_config,
    forward_config,
    head_dim_tile,
)
from attention_backend.jit.spec import KernelVariant
from attention_backend.problem import AttentionArgs


class Options(NamedTuple):
    """What of a problem is compiled in. (A tuple, because every launch looks its kernel up by it.)"""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    paged: bool = False
    key_mask: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: int = 0  # 0: none, 1: float32, 2: the tensors' own dtype
    dropout: bool = False

    @classmethod
    def of(cls, args: AttentionArgs) -> "Options":
        bias = 0 if args.bias is None else 1 if args.bias.dtype == torch.float32 else 2
        return cls(
            args.q.dtype,
            args.q.shape[-1],
            args.v.shape[-1],
            args.block_table is not None,
            args.key_mask is not None,
            args.softcap != 0.0,
            args.alibi_slopes is not None,
            bias,
            args.dropout_threshold > 0,
        )

    @property
    def tiles(self) -> tuple[int, int]:
        return head_dim_tile(self.head_dim), head_dim_tile(self.head_dim_v)

    @property
    def even(self) -> bool:
        return self.tiles == (self.head_dim, self.head_dim_v)

    @property
    def extras(self) -> bool:
        return self.key_mask or self.softcap or self.alibi or self.bias != 0 or self.dropout

    def defines(self) -> tuple[tuple[str, int], ...]:
        tile, tile_v = self.tiles
        element = ("FP32", 1) if self.dtype == torch.float32 else ("BF16", int(self.dtype == torch.bfloat16))
        return (
            element,
            ("HEAD_DIM", tile),
            ("HEAD_DIM_V", tile_v),
            ("PAGED", int(self.paged)),
            ("KEY_MASK", int(self.key_mask)),
            ("SOFTCAP", int(self.softcap)),
            ("ALIBI", int(self.alibi)),
            ("BIAS", self.bias),
            ("DROPOUT", int(self.dropout)),
        )


@cache
def forward_variant(options: Options, arch: str) -> tuple[KernelVariant, ForwardConfig]:
    config = forward_config(arch, *options.tiles, paged=options.paged, extras=options.extras)
    defines = (
        *options.defines(),
        ("EVEN", int(options.even)),
        ("NUM_WARPS", config.num_warps),
        ("ROW_TILES", config.row_tiles),
        ("BLOCK_N", config.block_n),
        ("MIN_BLOCKS", config.min_blocks),
    )
    return KernelVariant("flash_fwd_sm80", arch, defines, hot=not options.extras), config


@cache
def f32_variant(options: Options, arch: str) -> tuple[KernelVariant, Float32Config]:
    config = float32_config(arch, *options.tiles)
    return KernelVariant("flash_fwd_f32", arch, (*options.defines(), ("TILE", config.block_m))), config
