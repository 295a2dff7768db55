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

#: Bytes behind every row in shared memory.
ROW_PAD = 16


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
        pitch, pitch_v = 2 * tile + ROW_PAD, 2 * tile_v + ROW_PAD
        return self.block_m * max(pitch, pitch_v) + self.block_n * (pitch + pitch_v)


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


#: Rows, and keys, of a tile of flash_fwd_f32; the first whose shared memory fits is taken.
_FLOAT32_TILES = (32, 16)


@dataclass(frozen=True, slots=True)
class Float32Config:
    """Tile of flash_fwd_f32: `block_m` query rows by as many keys, eight threads a row."""

    block_m: int

    @property
    def threads(self) -> int:
        return 8 * self.block_m

    def smem_bytes(self, tile: int, tile_v: int) -> int:
        return 4 * self.block_m * (2 * (tile + 1) + tile_v + 1 + self.block_m + 1)


def float32_config(arch: str, tile: int, tile_v: int) -> Float32Config:
    for config in map(Float32Config, _FLOAT32_TILES):
        if config.smem_bytes(tile, tile_v) <= SHARED_MEMORY[arch]:
            return config
    raise AssertionError(f"no float32 tile fits {arch} at head_dim {tile}/{tile_v}")  # the covering set proves it


def forward_config(arch: str, tile: int, tile_v: int, *, paged: bool, extras: bool) -> ForwardConfig:
    """`extras`: scores are changed (softcap, ALiBi, bias) or masked by a key mask; like pages, they cost registers."""
    wide = max(tile, tile_v)
    if arch == "sm_90a" and wide in _FORWARD_SM90 and not extras and not (paged and wide == 64):
        return _FORWARD_SM90[wide]
    for config in _FORWARD[wide]:
        if config.smem_bytes(tile, tile_v) <= SHARED_MEMORY[arch]:
            return config
    raise AssertionError(f"no forward tile fits {arch} at head_dim {tile}/{tile_v}")  # the covering set proves it
