"""Problem -> tile configuration of the decode kernels. Pure arithmetic: no torch, no device."""

from dataclasses import dataclass
from math import gcd

from attention_backend.heuristics.sm80 import ROW_PAD, SHARED_MEMORY

#: Query rows of a key head's group that the decode kernels take.
DECODE_ROWS = 64
#: Up to how many they are faster than the Hopper forward: of more they read keys several times, where that, split over
#: the keys, has one tile (benchmarks/few_rows.py).
FEW_HOPPER_ROWS = 16
FEWEST_ROWS = 8  # of a tile
#: Of the multiprocessors, for decodes beside a chunk: 80 of an H200's 132, a block each (benchmarks/beside.py).
BESIDE_SHARE = 0.61
LEAST_BESIDE = 0.4  # with fewer, decodes take longer than their company saves
_PLANNED_BATCH = 1024  # sequences whose plan a block leaves room for
_HOPPER = "sm_90a"


def _merge_bytes(num_warps: int, rows: int, width: int) -> int:
    """parts/decode_merge.cuh: kMergeFloats."""
    return 4 * num_warps * rows * (width + 6)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of flash_decode: num_warps slices of 16 keys by `rows` query rows, `stages` slices in flight a warp."""

    num_warps: int
    rows: int
    stages: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def keys(self) -> int:
        return 16 * self.num_warps

    def smem_bytes(self, tile: int, tile_v: int, batch: int, kv_bytes: int = 2) -> int:
        """`kv_bytes`: of a cached element."""
        ring = self.num_warps * self.stages * 16 * (kv_bytes * (tile + tile_v) + 2 * ROW_PAD)
        queries = self.rows * (2 * tile + ROW_PAD + 4)
        return queries + max(ring, _merge_bytes(self.num_warps, self.rows, tile_v)) + 4 * (batch + 1)


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig:
    """Tile of flash_decode_sm90: `stages` tiles of 64 keys in flight, num_warps / 4 of them computed at a time."""

    num_warps: int
    rows: int
    stages: int
    merge_width: int  # value columns of one pass of the merge
    blocks_per_sm: int = 1
    keys: int = 64

    @property
    def threads(self) -> int:
        return 32 * self.num_warps + 32

    def smem_bytes(self, tile: int, tile_v: int, batch: int, kv_bytes: int = 2) -> int:
        ring = self.stages * hopper_stage_bytes(tile, tile_v, kv_bytes)
        queries = self.rows * (2 * tile + ROW_PAD + 4)
        merge = _merge_bytes(self.num_warps, self.rows, self.merge_width)
        return 1024 + ring + queries + merge + 16 * self.stages + 4 * (batch + 1)  # the ring starts at a multiple


def hopper_stage_bytes(tile: int, tile_v: int, kv_bytes: int) -> int:
    slabs = -(-tile * kv_bytes // 128) + -(-tile_v * kv_bytes // 128)
    return slabs * 64 * 128


# (num_warps, blocks_per_sm, stages), best first: the most bytes in flight.
_DECODE = ((4, 2, 4), (4, 2, 3), (4, 1, 4), (4, 1, 3), (4, 1, 2), (2, 1, 2), (1, 1, 2))


def decode_config(arch: str, tile: int, tile_v: int, rows: int, kv_bytes: int = 2) -> DecodeConfig:
    """`rows`: query rows of a key head's group. Bytes in flight, not arithmetic, decide: the most stages that fit."""
    padded = _padded_rows(rows, max(tile, tile_v), turing=arch == "sm_75")
    for warps, blocks, stages in _DECODE:
        config = DecodeConfig(warps, padded, stages, blocks)
        # Each block also has 1 KB of the driver's and static memory.
        if blocks * (config.smem_bytes(tile, tile_v, _PLANNED_BATCH, kv_bytes) + 2048) <= SHARED_MEMORY[arch] + 1024:
            return config
    raise AssertionError(f"no decode tile fits {arch} at head_dim {tile}/{tile_v}")  # the covering set proves it


def hopper_decode_config(tile: int, tile_v: int, rows: int, kv_bytes: int = 2) -> HopperDecodeConfig:
    """Enough stages first, then the most warps, then the fewest passes of the merge."""
    padded = _padded_rows(rows, max(tile, tile_v))
    fitting = []
    for num_warps in (8, 4) if padded == 8 else (4,):  # more rows need the registers of more threads
        for width in (256, 192, 128, 96, 64, 32):
            if width > tile_v or tile_v % width:
                continue
            without = HopperDecodeConfig(num_warps, padded, 0, width).smem_bytes(tile, tile_v, _PLANNED_BATCH, kv_bytes)
            free = SHARED_MEMORY[_HOPPER] - 1024 - without
            stages = min(free // (hopper_stage_bytes(tile, tile_v, kv_bytes) + 16), _MOST_STAGES)
            stages -= stages % (num_warps // 4)  # a stage is always the same warps'
            fitting.append((min(stages, _ENOUGH_STAGES), num_warps, width, stages))
    enough, num_warps, width, stages = max(fitting)
    assert enough > num_warps // 4, f"no decode tile fits at head_dim {tile}/{tile_v}"
    return HopperDecodeConfig(num_warps, padded, stages, width)


_MOST_STAGES = 12
_ENOUGH_STAGES = 4


def _padded_rows(rows: int, wide: int, *, turing: bool = False) -> int:
    """As many rows as registers allow; more are more blocks, which read the same keys again."""
    limits = ((64, 32), (128, 16), (256, 8)) if turing else ((128, 32), (256, 16))
    most = next(most for width, most in limits if wide <= width)
    return min(next((few for few in (FEWEST_ROWS, 16) if rows <= few), 32), most)


def beside_blocks(num_sms: int, num_kv_heads: int) -> int:
    """Of flash_decode_sm90, beside a chunk's attention: as many for each key head. 0: no such number is near the best
    one, so the two had better follow each other."""
    blocks = int(BESIDE_SHARE * num_sms) // num_kv_heads * num_kv_heads
    return blocks if blocks >= LEAST_BESIDE * num_sms else 0


def hopper_page_rows(page_size: int) -> int | None:
    """Keys of one TMA copy from a page; None when there would be too many copies."""
    rows = gcd(page_size, 64)
    return rows if rows >= 16 else None


#: A block's smallest share of the keys, in tiles: below it, more parts cost more than they save.
DECODE_MIN_TILES = 2
HOPPER_DECODE_MIN_TILES = 1
