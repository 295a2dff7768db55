"""Sizes of a layer -> how its chain (kernels/layer_chain_sm90.cuh) is run. Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

from attention_backend.heuristics.sm80 import SHARED_MEMORY

#: Rows of a call. More inputs leave less room for weights: four are hardly faster than one kernel after another.
MOST_ROWS = 4

_TILE_ROWS = 16  # of weights, which the tensor cores multiply at once
_ELEMENT = 2  # bytes
_PAD = 32  # elements behind a row of the input
_ALIGNMENT = 128
#: Warps, of which each has two tiles in the ring: the most first.
WARPS = (11, 10, 9, 8, 6, 4)
_TILES = 2


_LANES = 32

#: What the attention in front of a chain takes.
HEAD_DIMS = (32, 64, 96, 128)
MOST_HEADS = 8  # query heads a key head
MOST_KEYS = 4096  # of a row, where it is worth it: more are read faster by a kernel of their own


@dataclass(frozen=True, slots=True)
class ChainHeads:
    """Of the attention in front of a chain."""

    group: int  # query heads a key head
    num_kv_heads: int
    head_dim: int


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

    def smem_bytes(self, rows: int, width: int, widest: int, heads: ChainHeads | None = None) -> int:
        """Dynamic; `width`: of a residual's row; `widest`: of any input's; `heads`: of the attention in front."""
        padded = -(-widest // self.columns) * self.columns
        inputs = (rows * (padded + _PAD) + width) * _ELEMENT
        sums = 0 if heads is None else self.num_warps * (-(-heads.group * (heads.head_dim + 6) // 4) * 16)
        return _ALIGNMENT + self.stages * self.tile_bytes + max(inputs, sums)


def chain_config(rows: int, width: int, widest: int, heads: ChainHeads | None = None) -> ChainConfig | None:
    """None: the inputs leave too little shared memory for a ring of weights."""
    for warps in WARPS:
        config = ChainConfig(num_warps=warps)
        if config.smem_bytes(rows, width, widest, heads) + config.static_bytes <= SHARED_MEMORY["sm_90a"]:
            return config
    return None


def attention_parts(blocks: int, pairs: int) -> int:
    """Blocks that share the keys of each of so many pairs of a row and a key head: a lane reads what one leaves."""
    return max(1, min(_LANES, blocks // pairs))
