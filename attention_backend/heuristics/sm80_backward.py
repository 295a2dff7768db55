"""Problem -> tile configuration of the generic backward (mma.sync, sm_75 and up).

Pure arithmetic: no torch, no device.
"""

from dataclasses import dataclass

from attention_backend.heuristics.sm80 import ROW_PAD, SHARED_MEMORY

#: Keys of a block, at least.
FEWEST_KEYS = 32

_WALK = 48  # bytes of what a block keeps besides its tiles
_TERM_BYTES = 8  # lse2 and delta of a row
_RESIDENT_THREADS = 256  # of an SM: with 255 registers it has no more
_MAX_SECTIONS = 65535  # blocks of a grid in z


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tile of flash_bwd_sm80: block_n keys, walked by block_m query rows, and how its warps share each product.

    A tile of scores is shared by score_warps_m x score_warps_n warps, dK and dV by key_warps along the keys, dQ by
    row_warps along the rows; the rest of num_warps lies along the width. With `split` half of the warps has the
    probabilities and dV, the other half dP, dS and dK, and those counts are of a half's, but for dQ's.
    """

    block_m: int
    block_n: int
    num_warps: int
    score_warps_m: int
    score_warps_n: int
    key_warps: int
    row_warps: int
    stages: int = 1  # of the query tiles
    min_blocks: int = 1  # of an SM at a time, which the compiler leaves registers for
    split: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def smem_bytes(self, tile: int, tile_v: int) -> int:
        pitches = 2 * tile + 2 * tile_v + 2 * ROW_PAD
        scores = 2 * self.block_m * (2 * self.block_n + ROW_PAD)
        return self.block_n * pitches + scores + self.stages * self.block_m * (pitches + 8) + _WALK

    def fits(self, tile: int, tile_v: int) -> bool:
        """Whether every warp's part of the products is whole tiles of 16."""
        if self.split and tile != tile_v:
            return False
        key_width = self.num_warps // (2 if self.split else 1) // self.key_warps
        row_width = self.num_warps // self.row_warps
        return tile % (16 * key_width) == 0 and tile_v % (16 * key_width) == 0 and tile % (16 * row_width) == 0


# FlashAttention-2's tiles where they fit; then ever smaller ones. Best first, the first that fits is taken.
_WIDE_64 = (BackwardConfig(128, 128, 8, 4, 2, 4, 4, 2), BackwardConfig(128, 128, 8, 4, 2, 4, 4))
_WIDE_128 = (BackwardConfig(64, 128, 8, 2, 4, 4, 2, 2), BackwardConfig(64, 128, 8, 2, 4, 4, 2))
_WIDE_96 = (BackwardConfig(64, 128, 8, 2, 4, 4, 4, 2), BackwardConfig(64, 128, 8, 2, 4, 4, 4))
_SQUARE = (BackwardConfig(64, 64, 8, 4, 2, 2, 2, 2), BackwardConfig(64, 64, 8, 4, 2, 2, 2))
_SMALL = (
    BackwardConfig(64, 64, 4, 2, 2, 2, 2),
    BackwardConfig(32, 64, 4, 2, 2, 2, 2),
    BackwardConfig(32, 32, 4, 2, 2, 1, 2),
    BackwardConfig(32, 32, 4, 2, 2, 2, 2),
    BackwardConfig(16, 32, 4, 1, 2, 1, 1),
)
_BACKWARD = {
    32: (*_WIDE_64, *_SMALL),
    64: (*_WIDE_64, *_SMALL),
    96: (*_WIDE_96, *_SMALL),
    128: (*_WIDE_128, *_SQUARE, *_SMALL),
    192: (*_SQUARE, BackwardConfig(32, 64, 8, 2, 4, 2, 2), *_SMALL),
    256: (*_SQUARE, *_SMALL[2:]),
}

# In front of those: where the first of a width spills, and where two smaller blocks of an SM are faster than a large
# one, as one computes while the other waits (on an H200 at head_dim 64, 1.08 of the large tile).
_OF_ARCH = {
    ("sm_90a", 64): (BackwardConfig(64, 96, 4, 2, 2, 2, 2, 2),),
    ("sm_90a", 96): (BackwardConfig(64, 128, 8, 2, 2, 2, 4, 2, split=True),),
    ("sm_90a", 128): (BackwardConfig(64, 128, 8, 2, 2, 4, 2, 2, split=True),),
    ("sm_90a", 192): (BackwardConfig(64, 64, 8, 2, 2, 1, 2, 2, split=True),),
    ("sm_90a", 256): (BackwardConfig(64, 64, 8, 2, 2, 1, 2, 2, split=True),),
    ("sm_100", 64): (BackwardConfig(64, 128, 8, 2, 4, 4, 2, 2),),
    ("sm_100", 256): (BackwardConfig(64, 64, 8, 4, 2, 2, 4, 2),),
}
# In front of all, of short sequences, where a causal mask leaves half of a large tile empty.
_SHORT = {
    ("sm_90a", 64): (BackwardConfig(64, 64, 4, 2, 2, 2, 2, 2, min_blocks=3),),
    ("sm_90a", 128): (BackwardConfig(64, 64, 4, 2, 2, 2, 2, 1),),
}
_SHORT_KEYS = 512
_SHORT_WIDTH = 64  # up to which they are faster without a mask too


def is_short(tile: int, seqlen_k: int, *, tapered: bool) -> bool:
    """Whether sequences of so many keys have tiles of their own. `tapered`: with a causal mask."""
    return seqlen_k <= _SHORT_KEYS and (tapered or tile <= _SHORT_WIDTH)


def backward_config(arch: str, tile: int, tile_v: int, *, short: bool = False) -> BackwardConfig:
    wide = max(tile, tile_v)
    for config in (*(_SHORT.get((arch, wide), ()) if short else ()), *_OF_ARCH.get((arch, wide), ()), *_BACKWARD[wide]):
        if config.fits(tile, tile_v) and config.smem_bytes(tile, tile_v) <= SHARED_MEMORY[arch]:
            return config
    raise AssertionError(f"no backward tile fits {arch} at head_dim {tile}/{tile_v}")  # the covering set proves it


def group_parts(blocks: int, group: int, num_sms: int, *, tapered: bool) -> int:
    """Blocks that share a key head's `group` query heads: a divisor of it, as few as fill three quarters of the device.

    `blocks` is how many there are with one each. Several write float32 parts of dK and dV, which are added afterwards.
    `tapered`: a causal mask gives the first blocks twice the rows of the mean one, so there must be twice as many.
    """
    wanted = num_sms * (6 if tapered else 3)
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    return next((parts for parts in divisors if parts * blocks * 4 >= wanted), group)


def section_lines(
    config: BackwardConfig,
    tile: int,
    tile_v: int,
    *,
    rows: int,
    lines: int,
    key_tiles: int,
    num_sms: int,
    l2_bytes: int,
    tapered: bool,
) -> int:
    """Lines (parts of the query heads of a key head, of all sequences) whose key tiles of one number start together.

    The blocks of a line share the queries, output gradients and float32 dQ of `rows` rows. The L2 holds those of a
    section, but a section fills the device; twice under a causal mask (`tapered`), or the longest tiles of the last
    one would run beside idle SMs. Sections are even, and no more than a grid may have.
    """
    fitting = max(1, l2_bytes // max(1, rows * (2 * tile + 2 * tile_v + 4 * tile + _TERM_BYTES)))
    resident = num_sms * max(config.min_blocks, _RESIDENT_THREADS // config.threads)
    busy = -(-resident * (2 if tapered else 1) // max(1, key_tiles))
    sections = min(-(-lines // fitting), lines // busy, _MAX_SECTIONS)
    return -(-lines // max(1, sections))
