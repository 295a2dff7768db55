"""Problem -> the compiled Hopper forward that serves it. Knows no launch and no device."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from attention_backend.heuristics.sm90 import (
    ALONE,
    BY_HEADS,
    CLUSTER,
    FP8_HEAD_DIM,
    OWN_TILES,
    TALL_TILES,
    HopperConfig,
    head_dim_tiles,
    hopper_config,
    page_rows,
)
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.variants import Options


class HopperOptions(NamedTuple):
    """What of a problem is compiled in, beside `Options`; a tuple for the same reason."""

    options: Options
    long: bool = False  # of many keys
    page_size: int = 0  # 0: contiguous keys
    sparse: bool = False
    tall: bool = False  # tiles of 192 rows
    fp8: bool = False  # pages of e4m3
    own: bool = False  # warpgroups leave out keys that none of their own rows sees
    left_bounds: bool = False  # rows may see keys from some key on only
    cluster: str = ALONE  # whose blocks load keys for each other: BY_ROWS, BY_HEADS or ALONE


def reads_fp8_pages(options: Options) -> bool:
    """Whether there are variants of these options for pages of e4m3. Dispatch refuses the others."""
    scores_change = options.softcap or options.alibi or options.dropout
    return options.paged and max(options.head_dim, options.head_dim_v) <= FP8_HEAD_DIM and not scores_change


@dataclass(frozen=True, slots=True)
class HopperLayout:
    """Tile widths of keys and values, the tile, and the keys of one copy: of a whole tile, or a page's share of it."""

    tiles: tuple[int, int]
    config: HopperConfig
    copied_rows: int


def can_be_tall(which: HopperOptions) -> bool:
    """Whether there is a tile of 192 rows. At head_dim 128 one serves a key mask or a bias too; both would spill, and
    where scores are changed, or left out by chance, it is no faster than one of 128."""
    options = which.options
    tiles = head_dim_tiles(options.head_dim, options.head_dim_v)
    changed = options.softcap or options.alibi or options.dropout or (options.key_mask and options.bias != 0)
    served = not options.extras or (tiles == (128, 128) and not changed)
    return tiles in TALL_TILES and served and not (which.sparse or which.own or which.fp8)


def can_own_keys(which: HopperOptions) -> bool:
    """Whether there is a tile whose warpgroups leave out keys that none of their own rows sees."""
    options = which.options
    plain = not (options.paged or options.extras or which.sparse)
    return plain and head_dim_tiles(options.head_dim, options.head_dim_v) in OWN_TILES


def can_share_keys(which: HopperOptions) -> bool:
    """Whether blocks can load keys for each other: halves of columns, an even number of 64."""
    options = which.options
    tiles = head_dim_tiles(options.head_dim, options.head_dim_v)
    plain = not (options.extras or which.sparse or which.own or which.fp8)
    return plain and all(tile % (64 * CLUSTER) == 0 for tile in tiles)


@cache
def hopper_layout(which: HopperOptions) -> HopperLayout:
    options = which.options
    tiles = head_dim_tiles(options.head_dim, options.head_dim_v)
    config = hopper_config(
        *tiles,
        long=which.long,
        paged=options.paged,
        sparse=which.sparse,
        extras=options.extras,
        tall=which.tall,
        fp8=which.fp8,
        own=which.own,
    )
    if which.cluster:
        config = replace(config, cluster=CLUSTER)
    rows = (page_rows(which.page_size, config.block_n) or 0) if options.paged else config.block_n
    return HopperLayout(tiles, config, rows)


@cache
def hopper_variant(which: HopperOptions, *, pack: bool = False, split: bool = False) -> KernelVariant:
    if which.cluster and not can_share_keys(which):
        raise ValueError(f"no blocks load keys for each other with {which}")
    options, layout = which.options, hopper_layout(which)
    config, (tile, tile_v) = layout.config, layout.tiles
    if config.own_keys and (pack or split):
        raise ValueError(f"tile {config} knows no packed rows and no parts of the keys")
    if which.cluster == BY_HEADS and pack:
        raise ValueError(f"tile {config} holds the rows of one head: those of others are another block's")
    producer, consumer = config.registers
    defines = (
        ("BF16", int(options.dtype == torch.bfloat16)),
        ("HEAD_DIM", tile),
        ("HEAD_DIM_V", tile_v),
        ("BLOCK_M", config.block_m),
        ("BLOCK_N", config.block_n),
        ("STAGES", config.stages),
        ("Q_STAGES", config.q_stages),
        ("TURNS", int(config.turns)),
        ("OVERLAP", int(config.overlap or not config.turns)),
        ("OWN_KEYS", int(config.own_keys)),
        ("CLUSTER", config.cluster),
        ("CLUSTER_HEADS", int(which.cluster == BY_HEADS)),
        ("PRODUCER_REGISTERS", producer),
        ("CONSUMER_REGISTERS", consumer),
        ("PAGED", int(options.paged)),
        ("PAGE_ROWS", layout.copied_rows),
        ("FP8_PAGES", int(which.fp8)),
        ("RAW_STAGES", config.raw_stages),
        ("PACK", int(pack)),
        ("SPLIT", int(split)),
        ("SPARSE", int(which.sparse)),
        ("LEFT_BOUNDS", int(which.left_bounds)),
        ("KEY_MASK", int(options.key_mask)),
        ("SOFTCAP", int(options.softcap)),
        ("ALIBI", int(options.alibi)),
        ("BIAS", options.bias),
        ("DROPOUT", int(options.dropout)),
    )
    return KernelVariant("flash_fwd_sm90", "sm_90a", defines, hot=not options.extras)
