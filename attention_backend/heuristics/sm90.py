"""Problem -> tile configuration of the Hopper forward (wgmma, TMA), packing and splits. Pure arithmetic: no device."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, sqrt
from typing import NamedTuple

#: Tile widths; another head_dim is padded to the next one in shared memory, by the TMA.
HEAD_DIM_TILES = (64, 80, 96, 128, 192, 256)
#: Tiles whose keys are wider than their values (DeepSeek's).
MIXED_TILES = ((192, 128),)
#: Keys of one TMA copy from a page; fewer would be too many copies.
MIN_PAGE_ROWS = 16
#: Keys from which on wider tiles are faster: what they waste at their ends is little then.
LONG = 8192
#: Keys at which, under a causal mask, the tile of each of several warpgroups is seen in part so often that what none of
#: its own rows sees is worth leaving out; full rows leave out no more than a tile's ends. The first of a range is also
#: the fewest queries, and the fewest keys that a window shows.
OWN_CAUSAL, OWN_FULL = {64: range(LONG), 128: range(1024, 2 * LONG), 256: range(4096)}, {64: range(2048)}
#: Widths at which that is so however long the longest of uneven sequences is: most tiles are of shorter ones.
OWN_IF_UNEVEN = (64, 128)
#: Widths at which that is so only where tiles of 192 rows are faster than others even if they own nothing.
OWN_IF_TALL = (128,)
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
#: Queries from which on: tiles of fewer may be packed, or cut into parts (sm90_chunks.py has pairs of those).
SHARED_QUERIES = 2048
#: Pairs of a query and a key that tiles of 192 rows compute while those of 128 rows compute one, by the tile's width.
TALL_GAIN = {64: 1.22, 80: 1.12, 96: 1.12, 128: 1.08}
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
IDLE_TILES = 0.8  # for each SM: fewer leave some without work
FEW_TILES = 2.5  # for each SM: where some may be much longer than others, or a last round is a large part of all
PAIRED_TILES = 3  # the same of pairs of packed tiles (sm90_chunks.py): 2,048 rows of 32 heads are 2.7
SOME_TILES, SOME_SPLITS = 9, 3  # the same, where tiles are so long that a last round which is half empty costs more
MANY_STEPS = 256  # of such a tile
FEWEST_STEPS = 4  # of a part: kFewestSteps in parts/forward_work.cuh
#: What a part costs beside its steps, as its result is written and read again: kPartSteps there.
PART_STEPS = 5
MOST_ROUNDS = 8  # of parts: their results take memory, 100 MB so many on an H200 at head_dim 128
NEARLY = 1.02  # as fast: the fewest parts with which a problem is that
#: Rows are a chunk's, over many keys, where each of their tiles sees this share of what the last one sees.
EVEN_KEYS = 0.75

_SHARED_MEMORY = 227 * 1024
_TILE_SLOTS = 4  # descriptions of tiles
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
    turns: bool  # the warpgroups take turns at the tensor cores; else each overlaps its softmax with its own products
    stages: int = 2
    raw_stages: int = 0  # of keys and values of one byte, which a warpgroup more converts
    own_keys: bool = False  # each warpgroup leaves out what none of its own 64 rows sees, instead of the tile's
    cluster: int = 1  # blocks that load keys and values for each other
    overlap: bool = False  # with turns: it does both

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread."""
        if self.raw_stages:
            return 32, 224  # those that convert have as many as producers
        return (32, 160) if self.block_m == 192 else (40, 232)

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


#: By the tile widths of keys and values: tiles of 192 rows, where registers hold them,
TALL_TILES = {
    (64, 64): HopperConfig(192, 128, 2, turns=True),
    (80, 80): HopperConfig(192, 112, 2, turns=True),
    (96, 96): HopperConfig(192, 96, 2, turns=True),
    (128, 128): HopperConfig(192, 80, 2, turns=True),
}
#: and the tiles whose warpgroups can own keys.
OWN_TILES = {
    (64, 64): HopperConfig(192, 128, 2, turns=True, own_keys=True),
    (128, 128): HopperConfig(192, 80, 2, turns=True, own_keys=True),
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
    long: bool,
    paged: bool,
    sparse: bool,
    extras: bool,
    tall: bool = False,
    fp8: bool = False,
    own: bool = False,
) -> HopperConfig:
    """`tall`: of TALL_TILES, see is_tall. `own`: of OWN_TILES, see owns_keys. `long`: of LONG keys or more. `extras`:
    scores are changed, or masked by more than an interval of keys, which costs registers. `fp8`: of pages of e4m3,
    tiles up to FP8_HEAD_DIM.
    """
    if fp8:
        return HopperConfig(128, 128, 1, turns=tile > 64, raw_stages=2)
    if own or tall:
        return (OWN_TILES if own else TALL_TILES)[tile, tile_v]
    plain = not (sparse or extras)
    if tile == 64 and plain:
        return HopperConfig(128, 128, 2, turns=False)
    if tile <= 128:
        return HopperConfig(128, 160 if long and plain else 128, 2, turns=True, overlap=plain and tile == 128)
    if tile == 192:
        narrow = 64 if sparse else 96
        return HopperConfig(128, narrow if tile_v == 192 else 128 if not extras else 96, 1, turns=False)
    return HopperConfig(128, 80 if long and plain and not paged else 64, 1, turns=False)


class HopperSizes(NamedTuple):
    """What of a problem decides its tiles, and how keys are shared out. Lengths are upper bounds."""

    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    group: int  # query heads of a key head
    num_sms: int
    packable: bool  # the rows of a group may lie in one tile
    num_splits: int = 0  # 0: as many as fill the device
    #: Query rows of all sequences together, of varlen queries, whose tiles `seqlen_q` says little of: one long sequence
    #: among short ones bounds them all. None: every sequence has `seqlen_q` rows.
    total_rows: int | None = None
    partial: bool = False  # results are merged whatever their number is: the device may choose it for one sequence too
    causal: bool = False
    window: int | None = None  # keys in front of its own that a row sees; None: all

    @property
    def ragged(self) -> bool:
        return self.total_rows is not None and self.batch > 1

    @property
    def uneven(self) -> bool:
        """Some sequence has fewer rows than the longest."""
        return self.total_rows is not None and self.total_rows < self.batch * self.seqlen_q

    @property
    def typical_rows(self) -> float:
        """Of a row's sequence, where they are uneven. Nobody knows on the host; for lengths even from none to the
        longest it is 0.67 of that, which this says to be 0.71, and long tails it meets as well."""
        return sqrt((self.total_rows or 0) / self.batch * self.seqlen_q)


def owns_keys(tiles: tuple[int, int], sizes: HopperSizes, *, tall: bool) -> bool:
    """Whether warpgroups that leave out what none of their own rows sees are faster: for contiguous keys, plain scores,
    rows that are not packed and keys that are not split. `tall`: see is_tall. Measured from 512 keys on, at head_dim
    256 up to 2,048 (H100), at 128 on an H200.
    """
    keys = (OWN_CAUSAL if sizes.causal else OWN_FULL).get(tiles[0], range(0))
    shown = sizes.seqlen_k if sizes.window is None else sizes.window
    served = tiles in OWN_TILES and (tall or tiles[0] not in OWN_IF_TALL)
    any_length = sizes.uneven and sizes.causal and tiles[0] in OWN_IF_UNEVEN
    few = sizes.seqlen_k < keys.stop or any_length
    return served and few and min(sizes.seqlen_q, sizes.seqlen_k, shown) >= keys.start


def shares_keys_from(tile: int, group: int, *, causal: bool) -> tuple[str, int] | None:
    """Whose blocks load keys for each other, and from how many keys on; None: nobody's do.

    `group`: query heads of a key head.
    """
    if group % CLUSTER == 0:
        kind, keys = BY_HEADS, HEADS_KEYS
    else:
        kind, keys = BY_ROWS, CAUSAL_ROWS_KEYS if causal else ROWS_KEYS
    return (kind, keys[tile]) if tile in keys else None


def who_shares_keys(tile: int, rows: int, sizes: HopperSizes, *, can_own: bool) -> str:
    """BY_ROWS, BY_HEADS or ALONE. `tile`: its width; `rows`: its rows. `can_own`: warpgroups could own keys.

    Of pairs of rows two tiles are drawn at a time, so there may be another round of them. Of uneven sequences most rows
    see fewer keys than it takes, and warpgroups that own keys are faster.
    """
    shared = shares_keys_from(tile, sizes.group, causal=sizes.causal)
    if shared is None or sizes.seqlen_k < shared[1] or sizes.seqlen_q < SHARED_QUERIES:
        return ALONE
    if shared[0] == BY_HEADS:
        return BY_HEADS
    lines = sizes.batch * sizes.heads
    alone, together = (-(-sizes.seqlen_q // drawn) * lines for drawn in (rows, CLUSTER * rows))
    more_rounds = -(-together // (sizes.num_sms // CLUSTER)) > -(-alone // sizes.num_sms)
    owned = can_own and sizes.uneven and sizes.causal and tile in OWN_IF_UNEVEN
    return ALONE if more_rounds or owned else BY_ROWS


def page_rows(page_size: int, block_n: int) -> int | None:
    """Keys of one copy from a page: what divides page and tile. None when it is too small to be worth it."""
    rows = gcd(page_size, block_n)
    return rows if rows >= MIN_PAGE_ROWS else None


@lru_cache(maxsize=1024)  # the layers of a step have one
def hopper_plan(config: HopperConfig, sizes: HopperSizes, *, pack: bool | None = None) -> HopperPlan:
    """Whether a group's rows are packed (unless `pack` says it), and into how many parts the keys of a tile are cut."""
    if pack is None:
        pack = sizes.packable and 1 < sizes.group <= config.block_m and _packs(config, sizes)
    if sizes.num_splits == 0 and (sizes.ragged or sizes.partial):
        steps = max(1, -(-sizes.seqlen_k // config.block_n))
        most = _most_splits(_num_tiles(config, sizes, pack=pack), steps, sizes.num_sms)
        return HopperPlan(pack, _tile_rows(config, sizes, pack=pack), most, chosen=most > 1)
    return even_plan(config, sizes, pack=pack)


def _packs(config: HopperConfig, sizes: HopperSizes) -> bool:
    """Few rows over many keys by time, others by what their last tiles leave empty."""
    few = _num_tiles(config, sizes, pack=True) < FEW_TILES * sizes.num_sms
    if few and sizes.ragged:
        return True
    tile_rows = _tile_rows(config, sizes, pack=True)
    chunk = sizes.seqlen_q < SHARED_QUERIES and not sizes.partial
    if few and chunk and _keys_seen(tile_rows // sizes.group, sizes).even:
        alone, packed = (even_time(config, sizes, even_plan(config, sizes, pack=pack)) for pack in (False, True))
        return packed < alone
    filled = _share(sizes.seqlen_q * sizes.group, tile_rows) * tile_rows / config.block_m
    return _share(sizes.seqlen_q, config.block_m) < 0.9 * filled


def _tile_rows(config: HopperConfig, sizes: HopperSizes, *, pack: bool) -> int:
    return config.block_m // sizes.group * sizes.group if pack else config.block_m


def _num_tiles(config: HopperConfig, sizes: HopperSizes, *, pack: bool) -> int:
    """With those of a cluster that have no rows, where the last of a sequence's are drawn together."""
    drawn, (per_row, lines) = _drawn_rows(config, sizes, pack=pack), _per_row(sizes, pack=pack)
    lines *= config.cluster
    if sizes.total_rows is None:
        return -(-sizes.seqlen_q * per_row // drawn) * sizes.batch * lines
    return -(-min(sizes.batch * sizes.seqlen_q, sizes.total_rows) * per_row // drawn) * lines


def _drawn_rows(config: HopperConfig, sizes: HopperSizes, *, pack: bool) -> int:
    """Of a tile, or of the neighbouring tiles of a cluster."""
    return _tile_rows(config, sizes, pack=pack) * config.cluster


def _per_row(sizes: HopperSizes, *, pack: bool) -> tuple[int, int]:
    """A query's rows of a tile, and how many heads' tiles there are."""
    return (sizes.group, sizes.heads // sizes.group) if pack else (1, sizes.heads)


@lru_cache(maxsize=1024)
def even_plan(config: HopperConfig, sizes: HopperSizes, *, pack: bool) -> HopperPlan:
    """For sequences as long as each other, or given parts."""
    tiles, parts = _num_tiles(config, sizes, pack=pack), sizes.num_splits
    # Tiles of more queries may load keys for each other instead, unless these do.
    few = PAIRED_TILES if config.cluster > 1 else FEW_TILES if sizes.seqlen_q < SHARED_QUERIES else IDLE_TILES
    if parts == 0 and tiles < few * sizes.num_sms:
        seen = _keys_seen(_drawn_rows(config, sizes, pack=pack) // _per_row(sizes, pack=pack)[0], sizes)
        parts = _splits(seen, tiles, config.block_n, sizes.num_sms)
    return HopperPlan(pack, _tile_rows(config, sizes, pack=pack), max(1, min(parts, MAX_SPLITS)))


@lru_cache(maxsize=1024)
def is_tall(tiles: tuple[int, int], config: HopperConfig, sizes: HopperSizes) -> bool:
    """Whether TALL_TILES, which read keys a third less often but waste more rows and more of a last round of tiles, are
    faster than `config`, of 128 rows."""
    plan = hopper_plan(config, sizes)
    if sizes.seqlen_q * (sizes.group if plan.pack else 1) <= plan.tile_rows:
        return False
    return _time(TALL_TILES[tiles], sizes) < TALL_GAIN[tiles[0]] * _time(config, sizes)


def _time(config: HopperConfig, sizes: HopperSizes) -> float:
    """As even_time, of any sequences."""
    plan = hopper_plan(config, sizes)
    if sizes.uneven:  # how long each sequence is only the device knows: half of its last tile is empty
        per_row, lines = _per_row(sizes, pack=plan.pack)
        rows, (seqlen_q, seqlen_k, batch) = plan.tile_rows // per_row, sizes[:3]
        num_tiles = max(batch, (sizes.total_rows or 0) / rows + batch / 2) * lines
        own = (sizes.typical_rows + rows) / 2 if sizes.causal else sizes.typical_rows
        keys = min(max(seqlen_k - seqlen_q + own, 1), _most_seen(rows, sizes))
        return config.block_m * keys * num_tiles / sizes.num_sms
    return even_time(config, sizes, plan)


def even_time(config: HopperConfig, sizes: HopperSizes, plan: HopperPlan) -> float:
    """Of all tiles of sequences as long as each other, in rows times keys of one, were every configuration as fast."""
    per_row, lines = _per_row(sizes, pack=plan.pack)
    seen = _keys_seen(plan.tile_rows * config.cluster // per_row, sizes)
    tiles = seen.tiles * config.cluster * sizes.batch * lines
    return config.block_m * _walked(seen, tiles, plan.num_splits, config.block_n, sizes.num_sms)


class _KeysSeen(NamedTuple):
    """Of one sequence's rows: how many tiles they are, and how many keys those see at least, on average and at most."""

    tiles: int
    least: int
    mean: float
    most: int

    @property
    def even(self) -> bool:
        return self.least >= EVEN_KEYS * self.most


def _most_seen(rows: int, sizes: HopperSizes) -> int:
    """Keys that a tile of `rows` queries may see."""
    return sizes.seqlen_k if sizes.window is None else min(sizes.seqlen_k, sizes.window + rows)


@lru_cache(maxsize=1024)
def _keys_seen(rows: int, sizes: HopperSizes) -> _KeysSeen:
    tiles, most = -(-sizes.seqlen_q // rows), _most_seen(rows, sizes)
    last = min(max(sizes.seqlen_k, 1), most)
    if not sizes.causal or tiles == 1:
        return _KeysSeen(tiles, last, float(last), last)
    # Up to their last row's key, which may lie in front of all of them; and not more than the most.
    others = range(sizes.seqlen_k - sizes.seqlen_q + rows, sizes.seqlen_k, rows)
    one = bisect_right(others, 1)
    full = max(one, bisect_left(others, most))
    between = others[one:full]
    total = one * min(1, most) + _sum(between) + (len(others) - full) * most + last
    return _KeysSeen(tiles, min(max(others[0], 1), most), total / tiles, last)


def _sum(numbers: range) -> int:
    return (numbers[0] + numbers[-1]) * len(numbers) // 2 if numbers else 0


def _walked(seen: _KeysSeen, tiles: int, parts: int, block_n: int, num_sms: int) -> float:
    """Keys that the device's busiest multiprocessor walks, and what its parts cost beside that, in keys too.

    The longest tiles are drawn first: what stands still at the end does so for as long as the shortest take.
    """
    rounds = tiles * parts / num_sms
    spent = seen.mean * rounds + (ceil(rounds) - rounds) * seen.least
    return max(seen.most, spent) / parts + (ceil(rounds) * PART_STEPS * block_n if parts > 1 else 0)


def _share(rows: int, tile_rows: int) -> float:
    """Of the rows of all tiles, those that are real."""
    return rows / (-(-rows // tile_rows) * tile_rows)


def _splits(seen: _KeysSeen, tiles: int, block_n: int, num_sms: int) -> int:
    """The fewest parts of the keys that are nearly as fast as any number."""
    most = max(1, min(MAX_SPLITS, seen.most // block_n // FEWEST_STEPS, MOST_ROUNDS * num_sms // tiles))
    times = [_walked(seen, tiles, parts, block_n, num_sms) for parts in range(1, most + 1)]
    enough = NEARLY * min(times)
    return next(parts for parts, time in enumerate(times, 1) if time <= enough)


def _most_splits(tiles: int, steps: int, num_sms: int) -> int:
    """Of sequences whose lengths the host does not know: most tiles may be a short one's, so that few see many keys. 1
    where there are so many that even then the device is full."""
    if steps < 2 * FEWEST_STEPS:
        return 1
    if tiles >= FEW_TILES * num_sms:
        return SOME_SPLITS if tiles < SOME_TILES * num_sms and steps >= MANY_STEPS else 1
    return min(max(FEW_SPLITS, 2 * -(-num_sms // tiles)), steps // FEWEST_STEPS, MAX_SPLITS)
