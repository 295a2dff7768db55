"""Problem -> tile configuration of the generic kernels (mma.sync, sm_75 and up).

Pure arithmetic: no torch, no device.
"""

from dataclasses import dataclass

#: Dynamic shared memory a block may ask for, in bytes (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_MEMORY = {
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}

#: Tile widths; another head_dim is padded to the next one in shared memory.
HEAD_DIM_TILES = (32, 64, 96, 128, 192, 256)

_PAD = 16  # bytes behind every row in shared memory


def head_dim_tile(head_dim: int) -> int:
    return next(tile for tile in HEAD_DIM_TILES if tile >= head_dim)


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Tile of flash_fwd_sm80: BLOCK_M = 16 * num_warps * row_tiles query rows by block_n keys."""

    num_warps: int
    row_tiles: int
    block_n: int
    min_blocks: int = 1

    @property
    def block_m(self) -> int:
        return 16 * self.num_warps * self.row_tiles

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def smem_bytes(self, tile: int, tile_v: int) -> int:
        pitch, pitch_v = 2 * tile + _PAD, 2 * tile_v + _PAD
        return self.block_m * max(pitch, pitch_v) + self.block_n * (pitch + pitch_v)


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

    def smem_bytes(self, tile: int, tile_v: int, batch: int = 0) -> int:
        pitch, pitch_v = 2 * tile + _PAD, 2 * tile_v + _PAD
        ring = self.num_warps * self.stages * 16 * (pitch + pitch_v)
        merge = 4 * self.num_warps * self.rows * (tile_v + 6)
        return self.rows * pitch + max(ring, merge) + 4 * (batch + 1)


# Two row tiles a warp halve the shared memory traffic of a product, at the price of nearly all registers. These are the
# fastest on an H200, and only sm_90a's code for them does without a spill.
_FORWARD_SM90 = {64: ForwardConfig(4, 2, 128, 2), 128: ForwardConfig(4, 2, 64, 2)}

# Best first; the first whose shared memory fits is taken.
_FORWARD: dict[int, tuple[ForwardConfig, ...]] = {
    32: (ForwardConfig(4, 2, 64, 2), ForwardConfig(4, 1, 64)),
    64: (ForwardConfig(4, 2, 64, 2), ForwardConfig(4, 1, 64)),
    96: (ForwardConfig(8, 1, 64), ForwardConfig(4, 1, 64)),
    128: (ForwardConfig(8, 1, 64), ForwardConfig(4, 1, 64)),
    192: (ForwardConfig(8, 1, 64), ForwardConfig(4, 1, 32)),
    256: (ForwardConfig(8, 1, 64), ForwardConfig(4, 1, 32), ForwardConfig(4, 1, 16)),
}


def forward_config(arch: str, tile: int, tile_v: int, *, paged: bool, extras: bool) -> ForwardConfig:
    """`extras`: scores are changed (softcap, ALiBi, bias) or masked by a key mask; like pages, they cost registers."""
    wide = max(tile, tile_v)
    if arch == "sm_90a" and wide in _FORWARD_SM90 and not extras and not (paged and wide == 64):
        return _FORWARD_SM90[wide]
    for config in _FORWARD[wide]:
        if config.smem_bytes(tile, tile_v) <= SHARED_MEMORY[arch]:
            return config
    raise AssertionError(f"no forward tile fits {arch} at head_dim {tile}/{tile_v}")  # the covering set proves it


# (num_warps, blocks_per_sm, stages), best first: the most bytes in flight.
_DECODE = ((4, 2, 4), (4, 2, 3), (4, 1, 4), (4, 1, 3), (4, 1, 2), (2, 1, 2), (1, 1, 2))


def decode_config(arch: str, tile: int, tile_v: int, rows: int) -> DecodeConfig:
    """`rows`: query rows of a key head's group. Bytes in flight, not arithmetic, decide: the most stages that fit."""
    wide = max(tile, tile_v)
    # As many rows as registers allow; more are more blocks, which read the same keys again.
    most = 32 if wide <= 128 else 8 if arch == "sm_75" else 16
    padded = min(8 if rows <= 8 else 16 if rows <= 16 else 32, most)
    for warps, blocks, stages in _DECODE:
        config = DecodeConfig(warps, padded, stages, blocks)
        # Each block also holds the plan (of up to 1,024 sequences here), 1 KB of the driver's and static memory.
        if blocks * (config.smem_bytes(tile, tile_v, 1024) + 2048) <= SHARED_MEMORY[arch] + 1024:
            return config
    raise AssertionError(f"no decode tile fits {arch} at head_dim {tile}/{tile_v}")


#: A block's smallest share of the keys, in tiles: below it, more parts cost more than they save.
DECODE_MIN_TILES = 2
