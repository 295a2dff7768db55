"""Problem -> tiles of the Hopper backward, and the order of its work. Pure arithmetic: no device."""

from dataclasses import dataclass, replace

#: Tile widths; another head_dim is padded to the next one in shared memory, by the TMA.
HEAD_DIM_TILES = (64, 96, 128, 192, 256)
#: Tiles whose keys are wider than their values (DeepSeek's).
MIXED_TILES = ((192, 128),)

_SHARED_MEMORY = 227 * 1024
# Of queries, output gradients and dQ that blocks side by side work on. With 32 MB an H100, whose L2 has 50, fetched
# them more than once (head_dim 64, full, 512 tokens: 1.25 times as fast with 12, 1.3 times with 6).
_SECTION_BYTES = 6 << 20
# What two parts of a group may share where blocks wait for each other's additions.
_L2_BYTES = 12 << 20
# Of which there are sums of dQ at a time, and how many later a section is finished.
_HELD_SECTIONS, _LAGGING_SECTIONS = 5, 2
_CHUNK_BYTES = 64 * 64 * 4
_ZEROS_BYTES = _CHUNK_BYTES // 4
_TILE_SLOTS = 2  # descriptions of tiles of keys
_TILE_BYTES = 104  # a KeyTile (parts/backward_tiles.cuh) without its rows
_KEY_BYTES = 8  # a KeyRows
_CONSUMERS = 2
_STEP_ROWS = 64


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Tile of a kernel: `block_n` keys, tiles of `block_m` query rows in steps of 64, rings of stages."""

    kernel: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    q_stages: int
    o_stages: int
    ds_stages: int
    handover: int = 0  # chunks of 64 x 64 floats
    kept_k: int = 0  # slices of 16 columns of keys and of values that consumers keep in registers
    kept_v: int = 0
    apart: bool = False  # a warpgroup of its own computes dQ
    turns: bool = False  # of a tile of rows one warpgroup computes all of it, of the next one the other
    terms_first: bool = False  # scores and dP are added to what would be taken from them
    key_stages: int = 1  # tiles of keys and values: with two, the next ones are loaded while the last rows are computed
    finishes: bool = False  # dQ of sections in front, on the way, where registers are left for it
    cluster: int = 1  # blocks that share a tile: two, of head_dim above 128

    def __str__(self) -> str:
        if self.is_pair:
            return "pair"
        how = "apart" if self.apart else "turns" if self.turns else "joint"
        how += "-terms" if self.terms_first else ""
        return f"{how}-kept{self.kept_k}+{self.kept_v}"

    @property
    def is_pair(self) -> bool:
        """Two blocks have a tile of keys together."""
        return self.cluster > 1

    @property
    def threads(self) -> int:
        return 128 * (_CONSUMERS + 1 + self.apart)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a producer's, a consumer's and dQ's thread, if it has its own."""
        if self.is_pair:
            return (24, 240, 0)
        return (24, 208, 72) if self.apart else (24, 240, 0)

    @property
    def tile_slots(self) -> int:
        return _TILE_SLOTS

    @property
    def slabs(self) -> int:
        """Of 64 columns of a key."""
        return -(-self.head_dim // 64)

    @property
    def smem_bytes(self) -> int:
        seen = (1 if self.is_pair else _TILE_SLOTS) * _KEY_BYTES * self.block_n
        used = (self._pair_bytes if self.is_pair else self._block_bytes) + _TILE_SLOTS * _TILE_BYTES + seen
        # The tiles start at a multiple of 1,024, as the memory does where its declared alignment is kept.
        return min(used + 1024, _SHARED_MEMORY)

    @property
    def _block_bytes(self) -> int:
        """But for descriptions: tiles, rings, dS, what is handed over, barriers (parts/backward_shared.cuh)."""
        slabs, slabs_v = self.slabs, -(-self.head_dim_v // 64)
        keys = self.key_stages * (slabs + slabs_v) * self.block_n * 128
        rows = (self.q_stages * slabs + self.o_stages * slabs_v) * self.block_m * 128
        terms = (self.q_stages + self.o_stages) * self.block_m * 4
        ds = self.ds_stages * self.block_n * (_STEP_ROWS if self.apart else self.block_m) * 2
        rings = 2 * (self.q_stages + self.o_stages + _TILE_SLOTS + self.ds_stages * self.apart)
        barriers = 8 * (4 * self.key_stages + rings + _CONSUMERS + 3)
        return keys + rows + terms + ds + (self.handover * _CHUNK_BYTES + _ZEROS_BYTES * self.finishes) + barriers

    @property
    def _pair_bytes(self) -> int:
        """The same of either block of a pair, whichever has more (parts/backward_pair_shared.cuh)."""
        slab, row_slab = self.block_n * 128, self.block_m * 128
        slabs, slabs_v = self.slabs, -(-self.head_dim_v // 64)
        ds = self.block_n * self.block_m * 2
        keys = self.ds_stages * ds + slabs * slab + self.q_stages * slabs * row_slab
        probs_stages = self.ds_stages + 1
        values = probs_stages * ds + (slabs_v + slabs - _CONSUMERS) * slab + self.o_stages * slabs_v * row_slab
        stages = max(self.q_stages, self.o_stages)
        terms = max(self.q_stages, 2 * self.o_stages) * self.block_m * 4
        barriers = 8 * (4 + 2 * stages + 2 * _TILE_SLOTS + 2 * self.ds_stages + (2 + probs_stages) * _CONSUMERS + 3)
        return max(keys, values) + terms + barriers


def backward_tile(head_dim: int, head_dim_v: int, *, extras: bool = False) -> BackwardTile:
    """The tile that is used where no other is asked for.

    `extras`: scores are changed, masked by more than an interval of keys or dropped, which costs registers.
    """
    return backward_tiles(head_dim, head_dim_v)[-1 if extras else 0]


def backward_tiles(head_dim: int, head_dim_v: int) -> tuple[BackwardTile, ...]:
    """The tiles that serve a head_dim: the default first; last what serves extras, where that is another.
    `benchmarks/backward_tiles.py` times them beside each other.

    Both widths are padded to the larger one's tile, but for MIXED_TILES.
    """
    tile, tile_v = (next(t for t in HEAD_DIM_TILES if t >= d) for d in (head_dim, head_dim_v))
    if (tile, tile_v) not in MIXED_TILES:
        tile = tile_v = max(tile, tile_v)
    if tile > 128:
        return (BackwardTile("flash_bwd_pair_sm90", tile, tile_v, 64, 128, 4, 2, 2, cluster=2),)
    joint = BackwardTile("flash_bwd_sm90", tile, tile_v, 64, 128, 3, 2, 2, 2)
    if tile == 64:
        joint = replace(joint, block_m=128, kept_k=4, kept_v=4)
        return replace(joint, apart=True, key_stages=2, finishes=True), joint
    if tile == 96:
        return (replace(joint, turns=True, kept_k=4, finishes=True),)
    return replace(joint, terms_first=True, kept_k=4, finishes=True), replace(joint, kept_k=2)


def section_lines(
    tile: BackwardTile,
    *,
    seqlen_q: int,
    group: int,
    lines: int,
    key_tiles: int,
    num_sms: int,
    deterministic: bool,
    finishes: bool,
) -> int:
    """Key heads, of all sequences, whose key tiles of one number are worked on side by side.

    The longest tiles of many heads come first then, while what blocks share stays in the L2. A section keeps all SMs
    busy, or half of them where dQ is finished on the way: more sums of dQ than of five such would not stay in the L2.
    In deterministic mode, where the last section has an order of its own, there are two at least.
    """
    fitting = max(1, _SECTION_BYTES // max(1, _shared_bytes(tile, seqlen_q, group)))
    busy = -(-num_sms // (max(1, key_tiles) * (2 if finishes else 1)))
    sections = min(-(-lines // fitting), lines // busy)
    return -(-lines // max(sections, 2 if deterministic else 1))


def held_units(units: int, section: int) -> tuple[int, int]:
    """Of how many units (the query heads that a tile of keys adds to) there are sums of dQ at a time, and with the
    tiles of how many units later a unit's sums become elements, and zeros again, for another unit. All of them where
    kernels of their own do that for all, as where there are few.

    A section keeps half of the SMs busy, so its tiles have been added when those of the second behind it end, which
    finish it; the fifth has its sums. (Whole sections, finished with the next one and held for three, had blocks wait
    for the last tiles of a section: an H200, head_dim 128, causal, 1,024 and 2,048 tokens took 7 and 5 % longer.)
    """
    held = _HELD_SECTIONS * section
    return (held, _LAGGING_SECTIONS * section) if units > held else (units, units)


def query_parts(
    tile: BackwardTile,
    *,
    seqlen_q: int,
    key_tiles: int,
    lines: int,
    group: int,
    num_sms: int,
    tapered: bool,
    deterministic: bool,
) -> int:
    """Into how many parts the query heads of a key head are shared out: a divisor of `group`, 1 where tiles are many.

    Each part costs float32 copies of dK and dV and their sum. `tapered`: a causal mask gives the first tiles twice the
    rows of the mean one, so an SM needs more than one. Blocks are at different rows and heads then; in deterministic
    mode, where they wait for what they add, two parts at a time fit the L2 (8k with 4 query heads a key head, in one
    part each, had 0.65 of the default).
    """
    wanted = num_sms * 3 // 2 if tapered else num_sms
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]

    def enough(parts: int) -> bool:
        near = not (tapered and deterministic) or 2 * _shared_bytes(tile, seqlen_q, group // parts) <= _L2_BYTES
        return near and parts * key_tiles * lines >= wanted

    return next((parts for parts in divisors if enough(parts)), group)


def _shared_bytes(tile: BackwardTile, seqlen_q: int, group: int) -> int:
    """Of queries, output gradients and dQ of a key head."""
    return seqlen_q * group * (2 * (tile.head_dim + tile.head_dim_v) + 4 * tile.head_dim)
