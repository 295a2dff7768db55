"""Shape of a weight -> tiles and copies of skinny_linear. Pure arithmetic: no torch, no device.

`WARPS` is one for all: it orders the sums, so that a row's result is the same bits whatever else is computed with it.
"""

from dataclasses import dataclass, replace
from functools import cache

from attention_backend.heuristics.sm80 import SHARED_MEMORY

WARPS = 8
TILE_ROWS = 16
STEP = 32  # elements of k
#: Rows of x that a compiled kernel takes.
COLUMNS = (8, 16)
MAX_ROWS = COLUMNS[-1]
#: Where a warp's items wait, and what they are: RING of the kernel.
REGISTERS, STEPS, LINES = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Up to `tiles` of 16 rows of the weight at a time; `slots` items under way a warp, each of `group` tiles.

    `ring`: an item is a step in REGISTERS (where all items must be whole lines of all tiles), a step in shared memory
    (STEPS) or a line of two steps there (LINES).
    `prefetch`: bytes that a block of a kernel which starts early asks into L2 besides.
    """

    tiles: int
    group: int
    slots: int
    ring: int = STEPS
    prefetch: int = 96 * 1024
    blocks_per_sm: int = 2  # that registers are kept for: the next kernel's block beside this one's

    def smem_bytes(self, columns: int) -> int:
        partial = 4 * WARPS * columns * (TILE_ROWS * min(2, self.tiles) + 4)
        return partial + self.ring * WARPS * self.slots * self.group * TILE_ROWS * STEP * 2


# From so many tiles of a block on, by columns, the last that fits: 64 to 96 KB in flight an SM, room for the next
# kernel's block, and x read as few times as registers allow.
_RINGS = {
    8: (
        (1, SkinnyConfig(2, 2, 4)),
        (1, SkinnyConfig(2, 2, 6)),
        (3, SkinnyConfig(4, 1, 8)),
        (3, SkinnyConfig(4, 1, 12)),
        (5, SkinnyConfig(14, 2, 4)),
        (5, SkinnyConfig(14, 2, 6)),
    ),
    16: ((1, SkinnyConfig(2, 2, 4)), (3, SkinnyConfig(6, 2, 4))),
}
_TURING = SkinnyConfig(2, 1, 4, ring=REGISTERS)  # no asynchronous copies


@cache
def skinny_config(arch: str, n: int, columns: int, num_sms: int) -> SkinnyConfig:
    """The configuration for a weight of n rows."""
    if arch == "sm_75":
        return _TURING
    tiles = -(-n // (TILE_ROWS * num_sms))
    fitting = [c for least, c in _RINGS[columns] if tiles >= least and _fits(c, arch, columns, 1)]
    config = fitting[-1]  # the covering set proves that there is one
    return config if _fits(config, arch, columns, config.blocks_per_sm) else replace(config, blocks_per_sm=1)


def _fits(config: SkinnyConfig, arch: str, columns: int, blocks: int) -> bool:
    # An SM has 1 KiB more shared memory than a block may ask for, and each block takes 1 KiB for itself.
    return blocks * (config.smem_bytes(columns) + 1024) <= SHARED_MEMORY[arch] + 1024


def skinny_configs(arch: str, columns: int) -> tuple[SkinnyConfig, ...]:
    """Every configuration that a weight may get."""
    tallest = TILE_ROWS * _RINGS[columns][-1][0]
    return tuple(dict.fromkeys(skinny_config(arch, n, columns, 1) for n in range(TILE_ROWS, tallest + 1, TILE_ROWS)))
