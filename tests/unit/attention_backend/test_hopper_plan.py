"""The Hopper forward's tiles, packing and splits: arithmetic only."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backend.heuristics import sm90
from attention_backend.heuristics.sm90 import (
    ALONE,
    BY_HEADS,
    BY_ROWS,
    HopperConfig,
    HopperPlan,
    HopperSizes,
    head_dim_tiles,
    hopper_config,
    hopper_plan,
)
from attention_backend.kernels.hopper_variants import (
    HopperOptions,
    can_be_tall,
    can_own_keys,
    can_share_keys,
    hopper_variant,
)
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

_SHARED_MEMORY = 227 * 1024
_FLAGS = [(a, b, c, d) for a in (False, True) for b in (False, True) for c in (False, True) for d in (False, True)]
_TILES = [(t, t) for t in sm90.HEAD_DIM_TILES] + list(sm90.MIXED_TILES)


def config_of(tiles: tuple[int, int], flags: tuple[bool, bool, bool, bool]) -> HopperConfig:
    long, paged, sparse, extras = flags
    return hopper_config(*tiles, long=long, paged=paged, sparse=sparse, extras=extras)


@pytest.mark.parametrize("tiles", _TILES)
@pytest.mark.parametrize("flags", _FLAGS)
def test_every_tile_fits_a_multiprocessor(tiles: tuple[int, int], flags: tuple[bool, bool, bool, bool]) -> None:
    config = config_of(tiles, flags)
    assert config.smem_bytes(*tiles) <= _SHARED_MEMORY
    consumers = config.block_m // 64
    producer, consumer = config.registers
    # What is handed from the producers to the consumers must have been the block's at its launch.
    at_launch = 65536 // config.threads // 8 * 8
    assert 128 * (producer + consumers * consumer) <= at_launch * config.threads
    assert config.block_n % 16 == 0


@pytest.mark.parametrize("tiles", sm90.OWN_TILES)
def test_a_tile_whose_warpgroups_own_keys_fits_a_multiprocessor(tiles: tuple[int, int]) -> None:
    config = hopper_config(*tiles, long=False, paged=False, sparse=False, extras=False, own=True)
    assert config.own_keys
    assert config.smem_bytes(*tiles) <= _SHARED_MEMORY
    producer, consumer = config.registers
    assert 128 * (producer + config.block_m // 64 * consumer) <= 65536 // config.threads // 8 * 8 * config.threads


def test_keys_are_owned_only_where_scores_are_plain_and_keys_contiguous() -> None:
    def can(width: int, width_v: int | None = None, **options: Any) -> bool:
        return can_own_keys(HopperOptions(Options(torch.bfloat16, width, width_v or width, **options)))

    widths = (40, 64, 72, 96, 128, 192, 200, 256)
    assert [width for width in widths if can(width)] == [40, 64, 128, 200, 256]
    assert not can(192, 128)
    for option in ({"paged": True}, {"softcap": True}, {"alibi": True}, {"key_mask": True}, {"dropout": True}):
        assert not can(64, **option)
    assert not can_own_keys(HopperOptions(Options(torch.bfloat16, 64, 64), sparse=True))
    for way in ("pack", "split"):
        with pytest.raises(ValueError, match="no packed rows and no parts"):
            hopper_variant(HopperOptions(Options(torch.bfloat16, 64, 64), own=True), **{way: True})


@pytest.mark.parametrize(
    ("width", "causal", "lengths"),
    [(64, True, range(8192)), (64, False, range(2048)), (256, True, range(4096)), (256, False, range(0)),
     (128, True, range(1024, 16_384)), (128, False, range(0))],
)  # fmt: skip
def test_at_which_lengths_keys_are_owned(width: int, causal: bool, lengths: range) -> None:
    """As measured on an H100, at head_dim 128 on an H200."""
    for seqlen in (1, 512, 1023, 1024, 2047, 2048, 4095, 4096, 8191, 8192, 16_383, 16_384, 100_000):
        sizes = HopperSizes(seqlen, seqlen, 16, 32, 1, 132, packable=True, causal=causal)
        assert sm90.owns_keys((width, width), sizes, tall=True) == (seqlen in lengths)
        assert sm90.owns_keys((width, width), sizes, tall=False) == (seqlen in lengths and width != 128)


def test_few_queries_and_narrow_windows_have_no_keys_of_their_own_at_head_dim_128() -> None:
    sizes = HopperSizes(4096, 4096, 4, 32, 1, 132, packable=True, causal=True)
    owns = partial(sm90.owns_keys, tall=True)
    assert owns((128, 128), sizes)
    assert owns((128, 128), sizes._replace(window=1024))
    assert not owns((128, 128), sizes._replace(window=127))
    assert not owns((128, 128), sizes._replace(seqlen_q=100))
    assert owns((64, 64), sizes._replace(seqlen_q=100, window=127))


@pytest.mark.parametrize(
    ("width", "seqlen", "lines", "group", "causal", "who"),
    [
        (128, 8192, 16, 1, False, BY_ROWS),
        (128, 8191, 16, 1, False, ALONE),  # where it is slower
        (128, 8192, 16, 1, True, ALONE),
        (128, 16384, 16, 3, True, BY_ROWS),
        (256, 2048, 64, 1, False, BY_ROWS),
        (256, 2047, 64, 1, False, ALONE),
        (64, 100_000, 32, 1, False, ALONE),
        (128, 8192, 32, 4, True, BY_HEADS),
        (128, 8191, 32, 4, False, ALONE),
        (256, 8192, 16, 2, True, BY_HEADS),
        (256, 8191, 16, 2, True, ALONE),
        (256, 4100, 16, 1, False, ALONE),  # 5 rounds of pairs of tiles, and 4 of tiles
        (256, 4100, 2, 1, False, BY_ROWS),  # one round, either way
        (256, 12_545, 16, 1, False, ALONE),  # 13 rounds of pairs, and 12
        (256, 12_545, 16, 2, False, BY_HEADS),  # pairs of heads have as many as tiles
    ],
)
def test_whose_blocks_load_keys_for_each_other(
    width: int, seqlen: int, lines: int, group: int, causal: bool, who: str
) -> None:
    """As measured on an H100 and an H200."""
    sizes = HopperSizes(seqlen, seqlen, 1, lines, group, 132, packable=True, causal=causal)
    assert sm90.who_shares_keys(width, 128, sizes, can_own=True) == who


def test_few_queries_of_a_prompt_load_their_own_keys() -> None:
    for group, together in ((1, BY_ROWS), (4, BY_HEADS)):
        sizes = [HopperSizes(n, 100_000, 1, 32, group, 132, packable=True, causal=True) for n in (1, 2047, 2048, 8192)]
        found = [sm90.who_shares_keys(128, 128, x, can_own=True) for x in sizes]
        assert found == [ALONE, ALONE, together, together]


def test_uneven_sequences_own_keys_however_long_the_longest_is() -> None:
    """As measured on an H200: 16 heads, 64 lengths of a long tail up to 16,384, of 1,923 tokens on average."""
    sizes = HopperSizes(16_384, 16_384, 64, 16, 1, 132, packable=True, total_rows=64 * 1923, causal=True)
    even = sizes._replace(total_rows=64 * 16_384)
    for width in (64, 128):
        assert sm90.owns_keys((width, width), sizes, tall=is_tall(width, sizes))
        assert not sm90.owns_keys((width, width), even, tall=True)
        assert not sm90.owns_keys((width, width), sizes._replace(causal=False), tall=True)
    shares = partial(sm90.who_shares_keys, 128, 128, can_own=True)
    assert shares(sizes) == ALONE
    assert shares(sizes, can_own=False) == shares(even) == shares(sizes._replace(causal=False)) == BY_ROWS
    assert shares(sizes._replace(group=4)) == BY_HEADS
    assert not sm90.owns_keys((256, 256), sizes, tall=False)


@pytest.mark.parametrize(
    ("mean", "causal", "tall"),
    [(250, True, False), (992, True, True), (992, False, True), (1923, True, True), (30, False, False)],
)
def test_which_uneven_sequences_have_tiles_of_192_rows(mean: int, causal: bool, tall: bool) -> None:
    """Of 33, the longest 16 times as long as they are on average."""
    sizes = HopperSizes(16 * mean, 16 * mean, 33, 16, 1, 132, packable=True, total_rows=33 * mean, causal=causal)
    assert is_tall(128, sizes) == tall


@pytest.mark.parametrize("seqlen_k", [512, 1900, 2048, 4096, 32_768])
def test_tiles_of_uneven_rows_do_not_depend_on_how_many_keys_all_of_them_see(seqlen_k: int) -> None:
    """Of cross-attention, over fewer keys than the longest sequence has rows, too."""
    sizes = HopperSizes(4096, seqlen_k, 16, 32, 1, 132, packable=True, total_rows=16 * 1024)
    assert is_tall(128, sizes)


def test_sequences_as_long_as_the_longest_are_no_uneven_ones() -> None:
    """What is known of them is what is known of dense ones."""
    for length in (300, 512, 1024, 4096):
        dense = HopperSizes(length, length, 16, 16, 1, 132, packable=True, causal=True)
        assert is_tall(128, dense) == is_tall(128, dense._replace(total_rows=16 * length))


def test_blocks_that_load_keys_for_each_other_have_plain_tiles_of_their_own() -> None:
    plain = HopperOptions(Options(torch.bfloat16, 128, 128))
    assert can_share_keys(plain)
    found = [dict(hopper_variant(plain._replace(cluster=kind)).defines) for kind in (ALONE, BY_ROWS, BY_HEADS)]
    two = sm90.CLUSTER
    assert [(defines["CLUSTER"], defines["CLUSTER_HEADS"]) for defines in found] == [(1, 0), (two, 0), (two, 1)]
    for other in (
        plain._replace(sparse=True),
        HopperOptions(Options(torch.bfloat16, 64, 64)),  # one box of columns
        HopperOptions(Options(torch.bfloat16, 192, 128)),  # three
        HopperOptions(Options(torch.bfloat16, 256, 256), own=True),
        HopperOptions(Options(torch.bfloat16, 128, 128, softcap=True)),
        HopperOptions(Options(torch.bfloat16, 128, 128, paged=True), page_size=32, fp8=True),
    ):
        assert not can_share_keys(other)
        with pytest.raises(ValueError, match="no blocks load keys for each other"):
            hopper_variant(other._replace(cluster=BY_HEADS))
    with pytest.raises(ValueError, match="holds the rows of one head"):
        hopper_variant(plain._replace(cluster=BY_HEADS), pack=True)


@pytest.mark.parametrize("tiles", [(t, t) for t in sm90.HEAD_DIM_TILES if t <= sm90.FP8_HEAD_DIM])
def test_every_tile_over_float8_pages_fits_a_multiprocessor(tiles: tuple[int, int]) -> None:
    config = hopper_config(*tiles, long=True, paged=True, sparse=False, extras=False, fp8=True)
    assert config.smem_bytes(*tiles) <= _SHARED_MEMORY
    assert config.threads == 128 * (config.block_m // 64 + 2)
    lowered, raised = config.registers
    assert 128 * (2 * lowered + config.block_m // 64 * raised) <= 65536 // config.threads // 8 * 8 * config.threads
    assert config.block_n % 16 == 0


@pytest.mark.parametrize("tiles", _TILES)
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
def test_a_tile_is_whole_copies_from_pages(tiles: tuple[int, int], page_size: int) -> None:
    config = config_of(tiles, (True, True, False, False))
    rows = sm90.page_rows(page_size, config.block_n)
    assert rows is not None
    assert config.block_n % rows == 0
    assert page_size % rows == 0
    assert config.block_n // rows <= 32  # a lane each


@pytest.mark.parametrize("tiles", _TILES)
def test_a_block_of_a_sparse_mask_is_whole_tiles(tiles: tuple[int, int]) -> None:
    config = config_of(tiles, (False, False, True, False))
    assert config.block_m == sm90.SPARSE_BLOCK
    assert sm90.SPARSE_BLOCK % config.block_n == 0


@given(st.integers(1, 32), st.integers(1, 32))
def test_tiles_hold_every_head_dim(eighths: int, eighths_v: int) -> None:
    tile, tile_v = head_dim_tiles(8 * eighths, 8 * eighths_v)
    assert tile >= 8 * eighths
    assert tile_v >= 8 * eighths_v
    assert (tile, tile_v) in _TILES


@given(
    seqlen_q=st.integers(1, 40_000),
    seqlen_k=st.integers(1, 1_000_000),
    batch=st.integers(1, 300),
    kv_heads=st.integers(1, 64),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 48, 64, 128, 200]),
    packable=st.booleans(),
    num_splits=st.sampled_from([0, 1, 3, 500]),
)
def test_a_plan_packs_whole_groups_and_splits_within_bounds(
    seqlen_q: int, seqlen_k: int, batch: int, kv_heads: int, group: int, packable: bool, num_splits: int
) -> None:
    config = config_of((128, 128), (False, True, False, False))
    heads = kv_heads * group
    plan = hopper_plan(config, HopperSizes(seqlen_q, seqlen_k, batch, heads, group, 132, packable, num_splits))
    assert 1 <= plan.num_splits <= sm90.MAX_SPLITS
    if num_splits:
        assert plan.num_splits == min(num_splits, sm90.MAX_SPLITS)
    assert plan.tile_rows <= config.block_m
    if plan.pack:
        assert packable
        assert group > 1
        assert plan.tile_rows % group == 0
    else:
        assert plan.tile_rows == config.block_m


def test_few_rows_over_many_keys_fill_the_device() -> None:
    config = config_of((128, 128), (True, True, False, False))
    plan = hopper_plan(config, sizes_of(1, 128, 262_144))
    tiles = -(-128 * (4 if plan.pack else 1) // plan.tile_rows) * (8 if plan.pack else 32)
    assert tiles * plan.num_splits >= 0.85 * 132


@pytest.mark.parametrize("rows", [17, 32, 64, 128, 256, 544, 1088])
@pytest.mark.parametrize("batch", [1, 64])
def test_parts_that_are_merged_in_any_case_may_be_as_many_as_fill_the_device(rows: int, batch: int) -> None:
    """A graph has room for as many groups of rows as rows; one document, or a few, must not pay for that. The device
    chooses by the groups that there are (parts/forward_work.cuh)."""
    config, keys = config_of((128, 128), (False, True, False, False)), 100_000
    plan = hopper_plan(config, sizes_of(batch, rows, 131_072, rows)._replace(partial=True))
    assert plan.chosen
    for groups in (1, 2, 4):
        tiles = (-(-rows * 4 // plan.tile_rows) + groups - 1) * 8 if plan.pack else (-(-rows // 128) + groups - 1) * 32
        times = [-(-tiles * splits // 132) * (keys / splits + 384) for splits in range(1, plan.num_splits + 1)]
        assert min(times) < 1.2 * tiles * keys / 132


@pytest.mark.parametrize("keys", [50_000, 131_072, 1_000_000])
def test_whatever_the_rows_of_a_chunk_the_device_is_full(keys: int) -> None:
    """32 heads on 8: 633 rows are 5 rounds of tiles, of four parts each, and would be two of whole ones, of which the
    second would be a fifth full."""
    for rows in range(192, 1320, 12):
        sizes = sizes_of(1, rows, keys)._replace(causal=True)
        base = config_of((128, 128), (True, True, False, False))
        config = sm90.TALL_TILES[128, 128] if sm90.is_tall((128, 128), base, sizes) else base
        plan = hopper_plan(config, sizes)
        per_row = 4 if plan.pack else 1
        tiles = -(-rows * per_row // plan.tile_rows) * (32 // per_row)
        rounds = -(-tiles * plan.num_splits // 132)
        worth = sm90.TALL_GAIN[128] if config.block_m == 192 else 1.0
        assert 32 * rows * plan.num_splits / (132 * rounds * config.block_m) * worth > 0.8, (rows, config, plan)
        assert tiles * plan.num_splits <= sm90.MOST_ROUNDS * 132 or plan.num_splits == 1


def test_a_prompt_s_own_rows_are_packed_where_their_last_tiles_would_be_empty() -> None:
    """Not by the time of parts: rows see from few to all keys, and may own some."""
    config = config_of((128, 128), (False, True, False, False))
    for rows in (256, 512, 1024):
        assert hopper_plan(config, sizes_of(1, rows, rows)._replace(causal=True)) == HopperPlan(False, 128, 1)


@given(
    seqlen_q=st.integers(1, 300),
    seqlen_k=st.integers(0, 300),
    rows=st.integers(1, 100),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(0, 300)),
)
def test_what_tiles_see_is_counted_as_if_each_were_looked_at(
    seqlen_q: int, seqlen_k: int, rows: int, causal: bool, window: int | None
) -> None:
    sizes = HopperSizes(seqlen_q, seqlen_k, 1, 64, 64, 132, packable=True, causal=causal, window=window)
    most = seqlen_k if window is None else min(seqlen_k, window + rows)
    behind = [max(seqlen_q - first - rows, 0) if causal else 0 for first in range(0, seqlen_q, rows)]
    keys = [min(max(seqlen_k - after, 1), most) for after in behind]
    assert sm90._keys_seen(rows, sizes) == (len(keys), min(keys), sum(keys) / len(keys), max(keys))


def test_no_number_of_tiles_is_too_large_to_count() -> None:
    """They were walked, a millisecond for 100,000 rows."""
    sizes = HopperSizes(10**12, 10**12, 1, 64, 64, 132, packable=True, causal=True)
    assert sm90._keys_seen(2, sizes) == (5 * 10**11, 2, 5 * 10**11 + 1, 10**12)


@pytest.mark.parametrize(("width", "keys"), [(128, 16_384), (256, 40_000), (256, 131_072)])
def test_tiles_that_may_load_keys_for_each_other_are_not_packed_for_a_tie(width: int, keys: int) -> None:
    """2,048 rows of 16 heads on 8 are as many rounds either way; what packing gains was measured without such tiles."""
    config = config_of((width, width), (True, True, False, False))
    sizes = HopperSizes(2048, keys, 1, 16, 2, 132, packable=True, causal=True)
    assert hopper_plan(config, sizes) == HopperPlan(False, 128, 1)
    assert sm90.who_shares_keys(width, 128, sizes, can_own=False) == BY_HEADS
    assert hopper_plan(config, sizes._replace(seqlen_q=1024, heads=32, group=4)).pack, "fewer rows share nothing"


def test_short_rows_are_packed_and_long_ones_are_not() -> None:
    config = config_of((128, 128), (False, True, False, False))
    assert hopper_plan(config, sizes_of(1, 32, 4096)).pack
    assert not hopper_plan(config, sizes_of(1, 4096, 4096)).pack


def sizes_of(batch: int, seqlen_q: int, seqlen_k: int, total_rows: int | None = None) -> HopperSizes:
    """Of 8 key heads with 4 query heads each, on a GPU of 132 SMs."""
    return HopperSizes(seqlen_q, seqlen_k, batch, 32, 4, 132, packable=True, total_rows=total_rows)


def plan_of(batch: int, seqlen_q: int, seqlen_k: int, total_rows: int | None) -> HopperPlan:
    return hopper_plan(
        config_of((128, 128), (False, True, False, False)), sizes_of(batch, seqlen_q, seqlen_k, total_rows)
    )


def test_ragged_sequences_leave_the_number_of_parts_to_the_device() -> None:
    """180 rows over many keys beside 512 over few are 48 long tiles of 176: one part each would leave 84 SMs idle."""
    assert plan_of(16, 768, 131_072, 768) == HopperPlan(True, 128, sm90.FEW_SPLITS, chosen=True)
    assert plan_of(16, 64, 131_072, 64).num_splits > sm90.FEW_SPLITS
    assert plan_of(16, 64, 800, 64) == HopperPlan(True, 128, 1)
    assert not plan_of(16, 8192, 131_072, 8192).chosen
    assert not plan_of(16, 128, 65_536, None).chosen


def test_long_tiles_are_cut_where_a_last_round_would_be_half_empty() -> None:
    """Four sequences of 544 rows are 544 tiles, of which 132 run at once: 4.1 rounds, so 5. Cut in three: 12.4 rounds
    of a third, so 13."""
    assert plan_of(4, 544, 100_544, 2176) == HopperPlan(True, 128, sm90.SOME_SPLITS, chosen=True)
    assert plan_of(4, 544, 8192, 2176).num_splits == 1, "short tiles cost less than results of parts"


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 200_000))
def test_rows_beyond_what_the_sequences_can_have_change_no_plan(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    assert plan_of(1, seqlen_q, seqlen_k, seqlen_q) == plan_of(1, seqlen_q, seqlen_k, None)
    bound = plan_of(batch, seqlen_q, seqlen_k, batch * seqlen_q)
    assert plan_of(batch, seqlen_q, seqlen_k, batch * seqlen_q + 5000) == bound


def test_dense_sequences_fill_tiles_of_their_own() -> None:
    """16 sequences of 20 rows, each 80 packed ones, are 128 tiles though their rows would fit into 80."""
    assert plan_of(16, 20, 65_536, None).num_splits == 1


def is_tall(width: int, sizes: HopperSizes) -> bool:
    return sm90.is_tall((width, width), config_of((width, width), (False, False, False, False)), sizes)


@pytest.mark.parametrize(
    ("width", "length", "causal", "tall"),
    [(64, 256, True, False), (64, 512, True, False), (64, 1024, True, False), (64, 2048, True, True),
     (64, 256, False, False), (64, 512, False, True), (64, 1024, False, True), (64, 16_384, True, True),
     (128, 1024, False, False), (128, 2048, True, False), (128, 4096, True, True), (128, 4096, False, True),
     (128, 16_384, True, True), (128, 16_384, False, True), (96, 2048, True, True), (96, 1024, False, False)],
)  # fmt: skip
def test_which_lengths_have_tiles_of_192_rows(width: int, length: int, causal: bool, tall: bool) -> None:
    """As measured on an H200: 16k tokens, 2,048 / head_dim heads of each."""
    heads = 2048 // width
    sizes = HopperSizes(length, length, max(1, 16_384 // length), heads, 1, 132, packable=True, causal=causal)
    assert is_tall(width, sizes) == tall


@pytest.mark.parametrize(
    ("rows", "keys", "tall"),
    [
        (8192, 8192, True),
        (8192, 65_536, True),
        (2048, 32_768, False),
        (2048, 8192, False),
        (512, 65_536, True),
        (512, 12_000, False),
        (249, 100_000, False),
        (441, 100_000, False),
        (889, 100_000, True),
    ],
)
def test_which_chunks_of_a_prompt_have_tiles_of_192_rows(rows: int, keys: int, tall: bool) -> None:
    """As measured on an H200: 32 heads on 8. 2,048 rows are 3.9 rounds of tiles of 128 rows and 2.7 of 192: 4 and 3. Of
    few rows over many keys packed tiles are cut into parts, so that rounds are whole either way."""
    assert is_tall(128, sizes_of(1, rows, keys)._replace(causal=True)) == tall


@given(
    batch=st.integers(1, 64), seqlen_q=st.integers(1, 5000), more=st.integers(-200, 200_000), causal=st.booleans(),
    window=st.sampled_from([None, 0, 128, 4096]), ragged=st.booleans(), num_splits=st.sampled_from([0, 1, 3]),
    group=st.sampled_from([1, 3, 4, 7, 129, 192, 200]),
)  # fmt: skip
def test_rows_that_one_tile_of_128_holds_have_it(
    batch: int, seqlen_q: int, more: int, causal: bool, window: int | None, ragged: bool, num_splits: int, group: int
) -> None:
    sizes = sizes_of(batch, seqlen_q, max(seqlen_q + more, 1), batch * seqlen_q if ragged else None)
    sizes = sizes._replace(causal=causal, window=window, num_splits=num_splits, group=group, heads=2 * group)
    tall = is_tall(128, sizes)
    assert not (tall and seqlen_q * group <= 128 // group * group)


def test_a_narrow_window_is_seen_by_tiles_of_few_rows() -> None:
    sizes = sizes_of(1, 16_384, 16_384)._replace(causal=True)
    assert is_tall(128, sizes)
    assert is_tall(128, sizes._replace(window=4096))
    assert not is_tall(128, sizes._replace(window=128))


@pytest.mark.parametrize("tiles", sm90.TALL_TILES)
def test_a_tile_of_192_rows_fits_a_multiprocessor(tiles: tuple[int, int]) -> None:
    config = hopper_config(*tiles, long=True, paged=True, sparse=False, extras=False, tall=True)
    assert config.block_m == 192
    assert config.smem_bytes(*tiles) <= _SHARED_MEMORY
    for page_size in (16, 32, 48, 64, 128, 256):
        rows = sm90.page_rows(page_size, config.block_n)
        assert rows is not None
        assert config.block_n // rows <= 32
    producer, consumer = config.registers
    assert 128 * (producer + 3 * consumer) <= 65536 // config.threads // 8 * 8 * config.threads


def test_which_problems_have_tiles_of_192_rows() -> None:
    def can(width: int, width_v: int | None = None, **options: Any) -> bool:
        return can_be_tall(HopperOptions(Options(torch.bfloat16, width, width_v or width, **options)))

    assert [can(width) for width in (40, 64, 72, 96, 128, 192, 256)] == [True] * 5 + [False] * 2
    assert can(128, paged=True)
    assert not can(192, 128)
    assert can(128, key_mask=True)
    assert can(128, bias=1)
    assert not can(128, bias=1, key_mask=True), "would spill"
    assert not can(64, key_mask=True)
    for option in ({"softcap": True}, {"alibi": True}, {"dropout": True}, {"key_mask": True, "softcap": True}):
        assert not can(128, **option)
    plain = HopperOptions(Options(torch.bfloat16, 128, 128, paged=True), page_size=64)
    assert not can_be_tall(plain._replace(sparse=True))
    assert not can_be_tall(plain._replace(fp8=True))


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        ({}, False),
        ({"window_right": 0}, False),
        ({"window_right": 5}, False),
        ({"window_left": 0}, True),
        ({"window_left": 7, "window_right": 0}, True),
        ({"chunk_size": 4, "window_right": 0}, True),
        ({"seqused_k": torch.ones(1, dtype=torch.int32)}, False),
        ({"leftpad_k": torch.ones(1, dtype=torch.int32)}, True),
        ({"mask_desc": torch.zeros(1, 8, dtype=torch.int32)}, True),
    ],
    ids=str,
)
def test_kernels_that_know_no_bounds_on_the_left_serve_masks_that_have_none(mask: dict[str, Any], bounds: bool) -> None:
    x = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    assert AttentionArgs(x, x, x, 1.0, **mask).left_bounds == bounds
