"""Problem -> the compiled Hopper backward that serves it. Knows no launch and no device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

from attention_backend.heuristics.sm90_backward import (
    HEAD_DIM_TILES,
    MIXED_TILES,
    BackwardTile,
    backward_tile,
    backward_tiles,
)
from attention_backend.jit.spec import KernelVariant
from attention_backend.problem import AttentionArgs


@dataclass(frozen=True, slots=True)
class BackwardOptions:
    """What of a problem is compiled in."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    deterministic: bool = False
    parts: bool = False  # a block has a part of its key head's query heads
    key_mask: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    left_bounds: bool = False  # rows may see keys from some key on only
    finishes: bool = False  # dQ on the way (parts/backward_finish.cuh)

    @classmethod
    def of(cls, args: AttentionArgs, *, deterministic: bool, parts: bool = False) -> "BackwardOptions":
        return cls(
            args.dtype,
            args.head_dim,
            args.head_dim_v,
            deterministic,
            parts,
            args.key_mask is not None,
            args.softcap != 0.0,
            args.alibi_slopes is not None,
            args.dropout_threshold > 0,
            args.left_bounds,
        )

    @property
    def extras(self) -> bool:
        return self.key_mask or self.softcap or self.alibi or self.dropout

    @property
    def tile(self) -> BackwardTile:
        """The one that is used where no other is asked for."""
        return backward_tile(self.head_dim, self.head_dim_v, extras=self.extras)

    def can_finish(self, tile: BackwardTile) -> bool:
        """Whether a kernel of the tile can finish dQ on the way."""
        return tile.finishes and not self.parts and not self.deterministic


@cache
def backward_variant(options: BackwardOptions, tile: BackwardTile | None = None) -> tuple[KernelVariant, BackwardTile]:
    """Of the tile that is given, one of `backward_tiles`, or of the default; and the tile."""
    default = options.tile
    tile = tile or default
    if options.extras and tile != default:
        raise ValueError(f"tile {tile} does not serve {options}; {default} does")
    if options.finishes and not options.can_finish(tile):
        raise ValueError(f"tile {tile} does not finish dQ of {options}")
    producer, consumer, dq = tile.registers
    defines = (
        ("BF16", int(options.dtype == torch.bfloat16)),
        ("HEAD_DIM", tile.head_dim),
        ("HEAD_DIM_V", tile.head_dim_v),
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("CLUSTER", tile.cluster),
        ("TILE_SLOTS", tile.tile_slots),
        ("KEY_STAGES", tile.key_stages),
        ("Q_STAGES", tile.q_stages),
        ("O_STAGES", tile.o_stages),
        ("DS_STAGES", tile.ds_stages),
        ("HANDOVER", tile.handover),
        ("KEPT_K", tile.kept_k),
        ("KEPT_V", tile.kept_v),
        ("APART", int(tile.apart)),
        ("TURNS", int(tile.turns)),
        ("FINISHES", int(options.finishes)),
        ("TERMS_FIRST", int(tile.terms_first)),
        ("PRODUCER_REGISTERS", producer),
        ("CONSUMER_REGISTERS", consumer),
        ("DQ_REGISTERS", dq),
        ("DETERMINISTIC", int(options.deterministic)),
        ("PARTS", int(options.parts)),
        ("KEY_MASK", int(options.key_mask)),
        ("SOFTCAP", int(options.softcap)),
        ("ALIBI", int(options.alibi)),
        ("DROPOUT", int(options.dropout)),
        ("LEFT_BOUNDS", int(options.left_bounds)),
    )
    return KernelVariant(tile.kernel, "sm_90a", defines, hot=not options.extras), tile


@cache
def postprocess_variant(dtype: torch.dtype, slabs: int) -> KernelVariant:
    defines = (("BF16", int(dtype == torch.bfloat16)), ("SLABS", slabs))
    return KernelVariant("flash_bwd_postprocess_sm90", "sm_90a", defines, hot=True)


def covering_set() -> Iterator[KernelVariant]:
    """Every tile width, dtype and option."""
    for width in HEAD_DIM_TILES:
        plain = BackwardOptions(torch.bfloat16, width, width)
        for options in (
            plain,
            BackwardOptions(torch.float16, width, width),
            replace(plain, deterministic=True),
            replace(plain, left_bounds=True),
            replace(plain, parts=True),
            replace(plain, key_mask=True),
            replace(plain, softcap=True),
            replace(plain, alibi=True),
            replace(plain, dropout=True),
        ):
            variant, tile = backward_variant(options)
            yield variant
            yield postprocess_variant(options.dtype, tile.slabs)
            if options.can_finish(tile):
                yield backward_variant(replace(options, finishes=True))[0]
    for width, width_v in MIXED_TILES:
        yield backward_variant(BackwardOptions(torch.bfloat16, width, width_v))[0]


def other_tiles() -> Iterator[KernelVariant]:
    """What of the tiles that are not the default must not spill: no call selects them, benchmarks do."""
    for width in HEAD_DIM_TILES:
        plain = BackwardOptions(torch.bfloat16, width, width)
        kinds = [
            replace(plain, dtype=dtype, deterministic=deterministic)
            for dtype, deterministic in product((torch.bfloat16, torch.float16), (False, True))
        ]
        for tile in backward_tiles(width, width):
            for options in (*kinds, replace(plain, parts=True)):
                if tile == options.tile:
                    continue
                yield backward_variant(options, tile)[0]
                if options.can_finish(tile):
                    yield backward_variant(replace(options, finishes=True), tile)[0]
