"""Problem -> tile configuration of the FP8 forward (Hopper). Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

#: Head dimensions with an FP8 kernel.
HEAD_DIMS = (64, 128, 256)
_STAGES = 2
#: Keys and values that are worked on at once should stay in the L2 cache (50 MB on an H200).
_L2_BYTES = 32 << 20
_MAX_VALUE_PARTS = 32
_VALUE_PART_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Tile of flash_fwd_fp8_sm90: block_m / 64 consumer warpgroups, and how the register file is shared out."""

    block_m: int
    block_n: int
    producer_registers: int
    consumer_registers: int
    poly_every: int  # one exponential in so many is a polynomial on the FMA units (0: none)
    flush_tiles: int  # tiles after which the accumulators are added to float32 sums (0: never)

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    def smem_bytes(self, head_dim: int) -> int:
        tiles = head_dim * (self.block_m + 2 * _STAGES * self.block_n)
        sums = 4 * self.block_m * head_dim if self.flush_tiles else 0
        barriers = 8 * (1 + 4 * _STAGES)
        return tiles + sums + barriers + 1024  # the tiles start at a multiple of 1,024


def fp8_config(head_dim: int, *, causal: bool) -> Fp8Config:
    """Causal problems take narrower tiles: less of them is wasted at the diagonal."""
    if head_dim == 64:
        return Fp8Config(192, 128, 32, 160, 4, 32)
    if head_dim == 128:
        return Fp8Config(128, 128, 24, 240, 4, 32) if causal else Fp8Config(128, 224, 24, 240, 4, 16)
    return Fp8Config(128, 96, 24, 240, 0, 0)  # no shared memory is left for sums


def section_heads(num_heads: int, group: int, seqlen_k: int, head_dim: int) -> int:
    """Query heads whose tiles are worked on together."""
    kv_heads = _L2_BYTES // (2 * seqlen_k * head_dim)
    return max(1, min(num_heads, kv_heads * group))


def value_parts(seqlen_k: int) -> tuple[int, int]:
    """In how many parts the values' largest sizes are found, and the rows of a part."""
    parts = max(1, min(_MAX_VALUE_PARTS, seqlen_k // _VALUE_PART_ROWS))
    return parts, -(-seqlen_k // parts)
