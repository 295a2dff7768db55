"""Problem -> tile configuration of the Hopper forward (wgmma, TMA). Pure arithmetic: no torch, no device."""

from dataclasses import dataclass
from math import gcd

_STAGES = 2
#: Head dimensions with a Hopper kernel.
HEAD_DIMS = (64, 128, 256)
#: Keys of one TMA copy from a page; fewer would be too many copies.
MIN_PAGE_ROWS = 16
#: The narrowest tile of a paged problem: a page size that serves it serves the others too.
MIN_BLOCK_N = 64


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Tile of flash_fwd_sm90: block_m / 64 consumer warpgroups, and how the register file is shared out."""

    block_m: int
    block_n: int
    producer_registers: int
    consumer_registers: int

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    def smem_bytes(self, head_dim: int) -> int:
        tiles = 2 * head_dim * (self.block_m + 2 * _STAGES * self.block_n)
        barriers = 8 * (1 + 4 * _STAGES)
        return tiles + barriers + 1024  # the tiles start at a multiple of 1,024


def hopper_config(head_dim: int, *, full: bool, paged: bool) -> HopperConfig:
    """`full`: no row's keys depend on its position, so wider tiles waste nothing at a diagonal."""
    if head_dim == 64:
        return HopperConfig(192, 128, 32, 160)
    if head_dim == 128:
        return HopperConfig(128, 176 if full and not paged else 128, 24, 240)
    return HopperConfig(128, MIN_BLOCK_N if paged else 80, 24, 240)


def page_rows(page_size: int, block_n: int) -> int | None:
    """Keys of one copy from a page: what divides page and tile. None when it is too small to be worth it."""
    rows = gcd(page_size, block_n)
    return rows if rows >= MIN_PAGE_ROWS else None
