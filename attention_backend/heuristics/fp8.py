"""Problem -> tile configuration of the FP8 forward (Hopper). Pure arithmetic: no torch, no device."""

from dataclasses import dataclass

#: Head dimensions with an FP8 kernel.
HEAD_DIMS = (64, 128, 256)
#: Keys and values worked on at once should stay in the L2 cache (50 MB on an H200) beside what streams through it.
_L2_BYTES = 16 << 20
_QUERY_STAGES = _TILE_SLOTS = 2  # parts/forward_fp8_work.cuh
_TILE_BYTES = 40  # a description of a tile
_ONES = 8  # channels of ones behind those of values
#: Steps of a part that are worth writing its result to memory and reading it again.
_FEWEST_STEPS = 8
_MAX_VALUE_PARTS = 32
_VALUE_PART_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Tile of flash_fwd_fp8_sm90: block_m / 64 consumer warpgroups of 64 rows each, block_n keys at a time."""

    block_m: int
    block_n: int
    stages: int  # of the rings of keys and of values in shared memory

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    def smem_bytes(self, head_dim: int) -> int:
        tiles = head_dim * (_QUERY_STAGES * self.block_m + 2 * self.stages * self.block_n)
        if summed_by_product(head_dim):
            tiles += _ONES * self.stages * self.block_n
        scales = 4 * _QUERY_STAGES * self.block_m
        barriers = 8 * 2 * (_QUERY_STAGES + 2 * self.stages + _TILE_SLOTS)
        return tiles + scales + barriers + _TILE_SLOTS * _TILE_BYTES + 1024  # the tiles start at a multiple of 1,024

    def part_floats(self, head_dim: int) -> int:
        """What a tile's result of a part of its keys takes in device memory."""
        return self.block_m * (head_dim + 2)

    def counters(self, cut: int) -> int:
        """Of the line of tiles, and of each warp of the `cut` tiles that are cut into parts."""
        return 2 + cut * (self.block_m // 16)


def fp8_config(head_dim: int) -> Fp8Config:
    """Three consumers where their accumulators fit the registers; as many keys as registers hold then, unspilled."""
    return {64: Fp8Config(192, 192, 4), 128: Fp8Config(192, 128, 4), 256: Fp8Config(128, 160, 2)}[head_dim]


def summed_by_product(head_dim: int) -> bool:
    """Whether the tensor cores sum a row's probabilities, as rounded, by channels of ones behind those of the values.

    head_dim 256 leaves no shared memory for them.
    """
    return head_dim != 256


def section_heads(num_heads: int, group: int, seqlen_k: int, head_dim: int) -> int:
    """Query heads whose tiles are worked on together."""
    kv_heads = _L2_BYTES // (2 * seqlen_k * head_dim)
    return max(1, min(num_heads, kv_heads * group))


def value_parts(seqlen_k: int) -> tuple[int, int]:
    """In how many parts the values' largest sizes are found, and the rows of a part."""
    parts = max(1, min(_MAX_VALUE_PARTS, seqlen_k // _VALUE_PART_ROWS))
    return parts, -(-seqlen_k // parts)


def splits_of_last_round(tiles: int, k_tiles: int, num_sms: int) -> int:
    """Parts of the keys into which tiles that are all as long are cut where fewer are left than there are SMs."""
    left = tiles % num_sms
    return max(1, min(num_sms // left, k_tiles // _FEWEST_STEPS)) if left else 1
