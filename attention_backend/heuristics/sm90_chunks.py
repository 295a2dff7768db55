"""Chunk of a prompt over many keys -> pairs of packed tiles that load keys for each other, where those are faster. Pure
arithmetic: no device.

Such chunks are most of what a device does while a long prompt is read beside chats, so it is at its power limit, where
reading the L2 half as often is what counts (benchmarks/chunks.py)."""

from functools import lru_cache, partial
from typing import NamedTuple

from attention_backend.heuristics.sm90 import (
    LONG,
    SHARED_QUERIES,
    TALL_GAIN,
    HopperConfig,
    HopperPlan,
    HopperSizes,
    even_plan,
    even_time,
    hopper_plan,
)

#: Times as fast as tiles whose blocks load for themselves, of as many rows that are empty: 1.02 to 1.06 on an H200.
PAIRS_GAIN = 1.05
PAIRS_KEYS = 2 * LONG
#: Sequences up to which most rows are one's: the last pair of tiles of each may be half empty.
FEW_SEQUENCES = 4


class ChunkForm(NamedTuple):
    tall: bool
    plan: HopperPlan


class Tiles(NamedTuple):
    tall: bool  # of TALL_TILES
    config: HopperConfig


@lru_cache(maxsize=1024)  # the layers of a step have one
def chunk_form(width: int, alone: Tiles, pairs: tuple[Tiles, ...], sizes: HopperSizes) -> ChunkForm | None:
    """The pairs that serve a chunk; None where none do, or are no faster than tiles of their own.

    `width`: of a tile. `alone`: what is chosen of tiles whose blocks load for themselves.
    """
    rows = min(sizes.total_rows or 0, sizes.batch * sizes.seqlen_q) if sizes.ragged else sizes.seqlen_q
    packable = sizes.packable and 1 < sizes.group <= min(config.block_m for _, config in pairs)
    if rows > SHARED_QUERIES or not packable or sizes.partial or sizes.num_splits or sizes.seqlen_k < PAIRS_KEYS:
        return None
    if sizes.ragged and sizes.batch > FEW_SEQUENCES:
        return None
    # Of few sequences one has nearly all rows, and which it is only the device knows.
    one = sizes._replace(batch=1, seqlen_q=rows, total_rows=None) if sizes.ragged else sizes

    def time(tiles: Tiles, *, pack: bool) -> float:
        rows_and_keys = even_time(tiles.config, one, even_plan(tiles.config, one, pack=pack))
        gain = (TALL_GAIN[width] if tiles.tall else 1) * (PAIRS_GAIN if tiles.config.cluster > 1 else 1)
        return rows_and_keys / gain

    best = min(pairs, key=partial(time, pack=True))
    shared = PAIRS_GAIN if rows == SHARED_QUERIES else 1  # pairs of heads would serve them otherwise
    if time(best, pack=True) >= time(alone, pack=hopper_plan(alone.config, sizes).pack) / shared:
        return None
    return ChunkForm(best.tall, hopper_plan(best.config, sizes, pack=True))
