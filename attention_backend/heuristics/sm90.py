"""Problem -> tile configuration of the Hopper forward (wgmma, TMA), packing and splits. Pure arithmetic: no device."""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

#: Tile widths; another head_dim is padded to the next one in shared memory, by the TMA.
HEAD_DIM_TILES = (64, 80, 96, 128, 192, 256)
#: Tiles whose keys are wider than their values (DeepSeek's).
MIXED_TILES = ((192, 128),)
#: Keys of one TMA copy from a page; fewer would be too many copies.
MIN_PAGE_ROWS = 16
#: Keys from which on wider tiles are faster: what they waste at their ends is little then.
LONG = 8192
#: Queries up to which tiles of fewer rows may waste less than they cost (head_dim 64).
SHORT = 2048
#: Keys below which, under a causal mask, the tile of each of several warpgroups is seen in part so often that what none
#: of its own rows sees is worth leaving out; full rows leave out no more than a tile's ends.
OWN_CAUSAL, OWN_FULL = {64: LONG, 256: 4096}, {64: 2048}
#: Blocks that load keys and values for each other,
CLUSTER = 2
#: of neighbouring tiles of rows, or of the same rows of neighbouring query heads with one key head.
BY_ROWS, BY_HEADS, ALONE = "rows", "heads", ""
#: Keys from which on that is faster, by the tile's width. It saves energy, so it pays where a device is at its power
#: limit, as in a long prefill, and costs some percent where it has rested before (benchmarks/shared_keys.py).
HEADS_KEYS = {128: LONG, 256: LONG}
ROWS_KEYS = {128: LONG, 256: 2048}
#: Under a causal mask one of two neighbouring tiles walks keys that none of its rows sees.
CAUSAL_ROWS_KEYS = {128: 16384, 256: 32768}
#: Queries from which on: smaller chunks of a prompt run beside decodes, which leave power to spare.
SHARED_QUERIES = 2048
_WIDE_GAIN = 1.22  # pairs of a query and a key that a tile of 192 rows computes while one of 128 rows computes one
#: Widest tile of the kernel that reads pages of e4m3.
FP8_HEAD_DIM = 128
#: Rows of a sequence up to which pages of e4m3 are read as they are. It takes 4 to 13 % longer than reading 16 bits; to
#: copy them to 16 bits first takes as long for any number of rows, a third of the time of 256, 2 to 5 % of that of
#: 8,192. Both ways are as fast at 4,000 rows on 32,768 keys, at 1,000 on 131,072 and at 740 on 524,288 (interpolated;
#: H200, 32 query heads on 8, head_dim 128; docs/log.md).
FEW_FP8_ROWS = 1024
#: Rows and keys of a block of a block-sparse mask.
SPARSE_BLOCK = 128
MAX_SPLITS = 128
FEW_SPLITS = 8  # room for these at least, where some sequences may be much longer than others
FEW_TILES = 2.5  # for each SM: where some may be much longer than others
SOME_TILES, SOME_SPLITS = 9, 3  # the same, where tiles are so long that a last round which is half empty costs more
MANY_STEPS = 256  # of such a tile
FEWEST_STEPS = 4  # of a part: kFewestSteps in parts/forward_work.cuh

_SHARED_MEMORY = 227 * 1024
_TILE_SLOTS = 2  # descriptions of tiles
_TILE_BYTES = 96  # a description of a tile (parts/forward_work.cuh)
_OWN_BYTES = 16  # more of each warpgroup
_LISTED_BYTES = 8  # of a stage: its key and bits
_DRAWN_BYTES = 4 * (8 + 4)  # numbers of tiles that a cluster's blocks are told, with barriers


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Tile of flash_fwd_sm90: block_m / 64 consumer warpgroups, and how the register file is shared out."""

    block_m: int
    block_n: int
    q_stages: int
    turns: bool  # the warpgroups take turns at the tensor cores; else each overlaps its softmax with them
    stages: int = 2
    raw_stages: int = 0  # of keys and values of one byte, which a warpgroup more converts
    own_keys: bool = False  # each warpgroup leaves out what none of its own 64 rows sees, instead of the tile's
    cluster: int = 1  # blocks that load keys and values for each other

    def registers(self, *, roomy: bool) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread; `roomy`: producers have more to keep in mind."""
        if self.raw_stages:
            return 32, 224  # those that convert have as many as producers
        if self.block_m == 192:
            return 32, 160
        return (40, 232) if roomy or self.own_keys or self.cluster > 1 else (24, 240)

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1 + (self.raw_stages > 0))

    def smem_bytes(self, tile: int, tile_v: int) -> int:
        slabs, slabs_v = -(-tile // 64), -(-tile_v // 64)
        queries = self.q_stages * slabs * self.block_m * 128
        keys = self.stages * (slabs + slabs_v) * self.block_n * 128
        raw = self.raw_stages * (tile + tile_v) * self.block_n
        barriers = 8 * (2 * self.q_stages + 4 * (self.stages + self.raw_stages) + 2 * _TILE_SLOTS + 1)
        described = _TILE_SLOTS * (_TILE_BYTES + self.own_keys * _OWN_BYTES * (self.block_m // 64))
        # The tiles start at a multiple of 1,024.
        told = _DRAWN_BYTES if self.cluster > 1 else 0
        return queries + keys + raw + barriers + _LISTED_BYTES * self.stages + described + told + 1024


#: By the tile widths of keys and values: the tiles whose warpgroups can own keys.
OWN_TILES = {
    (64, 64): HopperConfig(192, 128, 2, turns=True, own_keys=True),
    (256, 256): HopperConfig(128, 64, 1, turns=False, own_keys=True),
}


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """How rows are laid into tiles, and keys shared out."""

    pack: bool  # the rows of all query heads of a key head lie in one tile
    tile_rows: int
    num_splits: int
    chosen: bool = False  # num_splits is the most: the device chooses each sequence's number by its length


def head_dim_tiles(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Tile widths of keys and values."""
    tile, tile_v = (next(t for t in HEAD_DIM_TILES if t >= d) for d in (head_dim, head_dim_v))
    if tile == tile_v or (tile, tile_v) in MIXED_TILES:
        return tile, tile_v
    return (max(tile, tile_v),) * 2


def hopper_config(
    tile: int,
    tile_v: int,
    *,
    short: bool,
    long: bool,
    paged: bool,
    sparse: bool,
    extras: bool,
    fp8: bool = False,
    own: bool = False,
) -> HopperConfig:
    """`short`: see is_short. `own`: see owns_keys. `long`: of LONG keys or more. `extras`: scores are changed, or
    masked by more than an interval of keys, which costs registers. `fp8`: of pages of e4m3, tiles up to FP8_HEAD_DIM.
    """
    if fp8:
        return HopperConfig(128, 128, 1, turns=tile > 64, raw_stages=2)
    if own:
        return OWN_TILES[tile, tile_v]
    if tile == 64 and not (sparse or extras):
        return HopperConfig(128, 128, 2, turns=False) if short else HopperConfig(192, 128, 2, turns=True)
    wide = long and not (sparse or extras)
    if tile <= 128:
        return HopperConfig(128, 160 if wide else 128, 2, turns=True)
    if tile == 192:
        narrow = 64 if sparse else 96
        return HopperConfig(128, narrow if tile_v == 192 else 128 if not extras else 96, 1, turns=False)
    return HopperConfig(128, 80 if wide and not paged else 64, 1, turns=False)


@lru_cache(maxsize=1024)
def is_short(seqlen_q: int, seqlen_k: int, *, causal: bool) -> bool:
    """Whether tiles of 192 rows would compute so many pairs that nobody sees that those of 128 are faster."""
    if seqlen_q > SHORT:
        return False
    return _computed(192, seqlen_q, seqlen_k, causal) > _WIDE_GAIN * _computed(128, seqlen_q, seqlen_k, causal)


def owns_keys(tiles: tuple[int, int], seqlen_k: int, *, causal: bool) -> bool:
    """Whether warpgroups that leave out what none of their own rows sees are faster: for contiguous keys, plain scores,
    rows that are not packed and keys that are not split. Measured on an H100 from 512
    keys on, at head_dim 256 up to 2,048.
    """
    limits = OWN_CAUSAL if causal else OWN_FULL
    return tiles in OWN_TILES and seqlen_k < limits.get(tiles[0], 0)


def shares_keys_from(tile: int, group: int, *, causal: bool) -> tuple[str, int] | None:
    """Whose blocks load keys for each other, and from how many keys on; None: nobody's do.

    `group`: query heads of a key head.
    """
    if group % CLUSTER == 0:
        kind, keys = BY_HEADS, HEADS_KEYS
    else:
        kind, keys = BY_ROWS, CAUSAL_ROWS_KEYS if causal else ROWS_KEYS
    return (kind, keys[tile]) if tile in keys else None


def who_shares_keys(
    tile: int, rows: int, *, seqlen_q: int, seqlen_k: int, causal: bool, lines: int, group: int, num_sms: int
) -> str:
    """BY_ROWS, BY_HEADS or ALONE. `tile`: its width; `rows`: its rows. `lines`: query heads of all sequences.

    Of pairs of rows two tiles are drawn at a time, so there may be another round of them.
    """
    shared = shares_keys_from(tile, group, causal=causal)
    if shared is None or seqlen_k < shared[1] or seqlen_q < SHARED_QUERIES:
        return ALONE
    alone, together = (-(-seqlen_q // drawn) * lines for drawn in (rows, CLUSTER * rows))
    more_rounds = -(-together // (num_sms // CLUSTER)) > -(-alone // num_sms)
    return ALONE if shared[0] == BY_ROWS and more_rounds else shared[0]


def _computed(rows: int, seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Pairs of a row and a tile of 128 keys; as many keys stand before the first query as make the last see all."""
    ends = (min(first + rows, seqlen_q) for first in range(0, seqlen_q, rows))
    seen = (max(seqlen_k - (seqlen_q - end if causal else 0), 1) for end in ends)
    return rows * sum(-(-keys // 128) for keys in seen)


def page_rows(page_size: int, block_n: int) -> int | None:
    """Keys of one copy from a page: what divides page and tile. None when it is too small to be worth it."""
    rows = gcd(page_size, block_n)
    return rows if rows >= MIN_PAGE_ROWS else None


@lru_cache(maxsize=1024)  # the layers of a step have one
def hopper_plan(
    config: HopperConfig,
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: int,
    group: int,
    num_sms: int,
    packable: bool,
    num_splits: int = 0,
    total_rows: int | None = None,
    partial: bool = False,
) -> HopperPlan:
    """`seqlen_q` and `seqlen_k` are upper bounds; `num_splits` 0: as many as fill the device. `partial`: results are
    merged whatever their number is, so the device may choose it for one sequence too.

    `total_rows`: query rows of all sequences together, of varlen queries, whose tiles `seqlen_q` says little of: one
    long sequence among short ones bounds them all. None: every sequence has `seqlen_q` rows.
    """
    tile_rows = config.block_m // group * group if group <= config.block_m else 0
    pack = packable and group > 1 and tile_rows > 0
    ragged = total_rows is not None and batch > 1
    rows = batch * seqlen_q if total_rows is None else min(batch * seqlen_q, total_rows)
    if pack and not (ragged and -(-rows * group // tile_rows) * (heads // group) < FEW_TILES * num_sms):
        packed = _share(seqlen_q * group, tile_rows) * tile_rows / config.block_m
        pack = _share(seqlen_q, config.block_m) < 0.9 * packed
    if not pack:
        tile_rows = config.block_m
    per_row, lines = (group, heads // group) if pack else (1, heads)
    if total_rows is None:
        tiles = -(-seqlen_q * per_row // tile_rows) * batch * lines
    else:
        tiles = -(-rows * per_row // tile_rows) * lines
    steps = max(1, -(-seqlen_k // config.block_n))
    if num_splits == 0 and (ragged or partial):
        most = _most_splits(tiles, steps, num_sms)
        return HopperPlan(pack, tile_rows, most, chosen=most > 1)
    splits = min(num_splits, MAX_SPLITS) or _splits(tiles, steps, num_sms)
    return HopperPlan(pack, tile_rows, splits)


def _share(rows: int, tile_rows: int) -> float:
    """Of the rows of all tiles, those that are real."""
    return rows / (-(-rows // tile_rows) * tile_rows)


def _splits(tiles: int, steps: int, num_sms: int) -> int:
    """The fewest parts of the keys that come within a tenth of the best use of the device; 1 where tiles are many."""
    if tiles >= 0.8 * num_sms or steps < 2 * FEWEST_STEPS:
        return 1
    most = min(MAX_SPLITS, steps // FEWEST_STEPS, num_sms)
    use = [tiles * s / (-(-tiles * s // num_sms) * num_sms) for s in range(1, most + 1)]
    return next(s for s, u in enumerate(use, 1) if u >= 0.9 * max(use))


def _most_splits(tiles: int, steps: int, num_sms: int) -> int:
    """Of sequences whose lengths the host does not know: most tiles may be a short one's, so that few see many keys. 1
    where there are so many that even then the device is full."""
    if steps < 2 * FEWEST_STEPS:
        return 1
    if tiles >= FEW_TILES * num_sms:
        return SOME_SPLITS if tiles < SOME_TILES * num_sms and steps >= MANY_STEPS else 1
    return min(max(FEW_SPLITS, 2 * -(-num_sms // tiles)), steps // FEWEST_STEPS, MAX_SPLITS)
