"""Problem -> tile configuration of the decode kernel. Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

from attention_backend.heuristics.sm80 import ROW_PAD, SHARED_MEMORY


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
        pitch, pitch_v = 2 * tile + ROW_PAD, 2 * tile_v + ROW_PAD
        ring = self.num_warps * self.stages * 16 * (pitch + pitch_v)
        merge = 4 * self.num_warps * self.rows * (tile_v + 6)
        return self.rows * pitch + max(ring, merge) + 4 * (batch + 1)


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
