"""Problem -> tile configuration of the FP8 forward (Hopper). Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

#: Head dimensions with an FP8 kernel.
HEAD_DIMS = (64, 128, 256)
#: Keys and values that are worked on at once should stay in the L2 cache (50 MB on an H200).
_L2_BYTES = 32 << 20
_MAX_VALUE_PARTS = 32
_VALUE_PART_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Tile of flash_fwd_fp8_sm90: block_m / 64 consumer warpgroups, and how the register file is shared out.

    The tensor cores add up sum_tiles * block_n keys at a time, of sum_columns columns of the output; float32 the rest.
    """

    block_m: int
    block_n: int
    stages: int  # tiles of keys, and of values, in shared memory
    producer_registers: int
    consumer_registers: int
    integer_max: bool  # scores are compared as integers
    overlap: bool  # the values of a tile are added during the softmax of the next
    turns: bool  # warpgroups take turns at the tensor cores
    sum_columns: int
    sum_tiles: int

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    def smem_bytes(self, head_dim: int) -> int:
        tiles = head_dim * (self.block_m + 2 * self.stages * self.block_n)
        barriers = 8 * (1 + 4 * self.stages)
        return tiles + barriers + 1024  # the tiles start at a multiple of 1,024


def fp8_config(head_dim: int, *, causal: bool) -> Fp8Config:  # noqa: ARG001
    if head_dim == 64:
        return Fp8Config(192, 128, 4, 32, 160, True, False, False, 64, 1)
    if head_dim == 128:
        return Fp8Config(128, 128, 4, 24, 240, True, True, True, 128, 2)
    # No registers are left for the sums of all columns.
    return Fp8Config(128, 128, 2, 24, 240, True, False, True, 128, 1)


def section_heads(num_heads: int, group: int, seqlen_k: int, head_dim: int) -> int:
    """Query heads whose tiles are worked on together."""
    kv_heads = _L2_BYTES // (2 * seqlen_k * head_dim)
    return max(1, min(num_heads, kv_heads * group))


def value_parts(seqlen_k: int) -> tuple[int, int]:
    """In how many parts the values' largest sizes are found, and the rows of a part."""
    parts = max(1, min(_MAX_VALUE_PARTS, seqlen_k // _VALUE_PART_ROWS))
    return parts, -(-seqlen_k // parts)
