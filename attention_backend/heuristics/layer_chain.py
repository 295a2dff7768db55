"""Sizes of a layer -> how its chain (kernels/layer_chain_sm90.cuh) is run. Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

from attention_backend.heuristics.sm80 import SHARED_MEMORY

#: Rows of a call. The kernel takes four, which are as fast one kernel after another: their inputs leave a small ring.
MOST_ROWS = 3

_TILE_ROWS = 16  # of weights, which the tensor cores multiply at once
_ELEMENT = 2  # bytes
_PAD = 32  # elements behind a row of the input
_ALIGNMENT = 128
#: Warps, of which each has two tiles in the ring: the most first.
WARPS = (11, 10, 9, 8, 6, 4)
_TILES = 2


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """A block has `num_warps` warps that compute, beside one that loads, and a ring of tiles of 16 weight rows and
    `columns` columns, of which `in_flight` at most are on their way."""

    num_warps: int
    in_flight: int = 6
    columns: int = 256

    @property
    def stages(self) -> int:
        """Tiles in the ring: a multiple of the warps, so that what a place held before was the same warp's."""
        return _TILES * self.num_warps

    @property
    def threads(self) -> int:
        return 32 * self.num_warps + 32

    @property
    def tile_bytes(self) -> int:
        return _TILE_ROWS * self.columns * _ELEMENT

    @property
    def static_bytes(self) -> int:
        """Sums of two groups, of up to 4 rows, squares of rows, barriers."""
        return self.num_warps * (2 * 4 * _TILE_ROWS + 4) * 4 + 1024

    def smem_bytes(self, rows: int, width: int, widest: int) -> int:
        """Dynamic; `width`: of a residual's row; `widest`: of any input's."""
        padded = -(-widest // self.columns) * self.columns
        return _ALIGNMENT + self.stages * self.tile_bytes + (rows * (padded + _PAD) + width) * _ELEMENT


def chain_config(rows: int, width: int, widest: int) -> ChainConfig | None:
    """None: the inputs leave too little shared memory for a ring of weights."""
    for warps in WARPS:
        config = ChainConfig(num_warps=warps)
        if config.smem_bytes(rows, width, widest) + config.static_bytes <= SHARED_MEMORY["sm_90a"]:
            return config
    return None
