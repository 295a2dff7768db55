"""Problem -> tile configuration of the FP8 forward (Hopper). Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

#: Head dimensions with an FP8 kernel.
HEAD_DIMS = (64, 128, 256)
#: Keys and values worked on at once should stay in the L2 cache (50 MB on an H200) beside what streams through it.
_L2_BYTES = 16 << 20
_STAGES = 2  # parts/forward_fp8_tiles.cuh: tiles of keys, and of values, in shared memory
_MAX_VALUE_PARTS = 32
_VALUE_PART_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Tile of flash_fwd_fp8_sm90: block_m / 64 consumer warpgroups of 64 rows each, block_n keys at a time."""

    block_m: int
    block_n: int

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    def smem_bytes(self, head_dim: int) -> int:
        tiles = head_dim * (self.block_m + 2 * _STAGES * self.block_n)
        barriers = 8 * (1 + 4 * _STAGES)
        return tiles + barriers + 1024  # the tiles start at a multiple of 1,024


def fp8_config(head_dim: int) -> Fp8Config:
    """Three consumers where their accumulators fit the registers; as many keys as then fit."""
    return {64: Fp8Config(192, 128), 128: Fp8Config(192, 160), 256: Fp8Config(128, 160)}[head_dim]


def section_heads(num_heads: int, group: int, seqlen_k: int, head_dim: int) -> int:
    """Query heads whose tiles are worked on together."""
    kv_heads = _L2_BYTES // (2 * seqlen_k * head_dim)
    return max(1, min(num_heads, kv_heads * group))


def value_parts(seqlen_k: int) -> tuple[int, int]:
    """In how many parts the values' largest sizes are found, and the rows of a part."""
    parts = max(1, min(_MAX_VALUE_PARTS, seqlen_k // _VALUE_PART_ROWS))
    return parts, -(-seqlen_k // parts)
