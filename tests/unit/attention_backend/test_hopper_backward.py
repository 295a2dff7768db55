"""The Hopper backward's tiles, order of work and parts of a group: arithmetic only."""

import ctypes
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backend.heuristics import sm90_backward
from attention_backend.heuristics.sm90_backward import (
    BackwardTile,
    backward_tile,
    backward_tiles,
    held_units,
    query_parts,
    section_lines,
)
from attention_backend.kernels.hopper_backward_params import BackwardParams, RowsOfDqParams
from attention_backend.kernels.hopper_backward_variants import (
    BackwardOptions,
    backward_variant,
    covering_set,
    other_tiles,
)

_SHARED_MEMORY = 227 * 1024
_TILES = [(t, t) for t in sm90_backward.HEAD_DIM_TILES] + list(sm90_backward.MIXED_TILES)


_ALL_TILES = [tile for widths in _TILES for tile in backward_tiles(*widths)]


def least_bytes(tile: BackwardTile) -> int:
    """Of tiles, rings, dS and what is handed over: of one block, or of the larger one of a pair."""
    slabs_v = -(-tile.head_dim_v // 64)
    slab, row_slab = tile.block_n * 128, tile.block_m * 128
    ds_rows = 64 if tile.apart else tile.block_m
    ds = tile.ds_stages * tile.block_n * ds_rows * 2 + tile.handover * 64 * 64 * 4
    if not tile.is_pair:
        keys = tile.key_stages * slab * (tile.slabs + slabs_v)
        return ds + keys + row_slab * (tile.q_stages * tile.slabs + tile.o_stages * slabs_v)
    of_keys = tile.slabs * (slab + tile.q_stages * row_slab)
    probs = tile.block_n * tile.block_m * 2
    of_values = slabs_v * (slab + tile.o_stages * row_slab) + (tile.slabs - 2) * slab + probs
    return ds + max(of_keys, of_values)


@pytest.mark.parametrize("tile", _ALL_TILES, ids=lambda tile: f"{tile.head_dim}-{tile.head_dim_v}-{tile}")
def test_every_tile_fits_a_multiprocessor(tile: BackwardTile) -> None:
    assert least_bytes(tile) < tile.smem_bytes <= _SHARED_MEMORY
    producer, consumer, dq = tile.registers
    # What is handed from the producers to the consumers must have been the block's at its launch.
    at_launch = 65536 // tile.threads // 8 * 8
    assert 128 * (producer + 2 * consumer + dq) <= at_launch * tile.threads


@given(st.integers(2, 32), st.integers(2, 32))
def test_tiles_hold_every_head_dim(eighths: int, eighths_v: int) -> None:
    tile = backward_tile(8 * eighths, 8 * eighths_v)
    assert (tile.head_dim, tile.head_dim_v) in _TILES
    assert tile.head_dim >= 8 * eighths
    assert tile.head_dim_v >= 8 * eighths_v
    # dQ of a step, or of two, is a chunk of 64 x 64 a warpgroup, of which a pair of blocks has four.
    if not tile.is_pair:
        assert tile.block_m // 64 * tile.slabs == 2
    else:
        assert 2 < tile.slabs <= 4


def test_the_default_tile_is_the_first_and_extras_have_the_last() -> None:
    for widths in _TILES:
        tiles = backward_tiles(*widths)
        assert backward_tile(*widths) == tiles[0]
        assert backward_tile(*widths, extras=True) == tiles[-1]
        assert BackwardOptions(torch.bfloat16, *widths, deterministic=True).tile == tiles[0]
        assert not tiles[-1].apart
        assert not tiles[-1].terms_first
        assert all((x.kernel, x.head_dim, x.head_dim_v) == (tiles[0].kernel, *widths) for x in tiles)


def test_tiles_are_told_apart_by_their_names() -> None:
    names = {widths: [str(tile) for tile in backward_tiles(*widths)] for widths in _TILES}
    assert names[64, 64] == ["apart-kept4+4", "joint-kept4+4"]
    assert names[128, 128] == ["joint-terms-kept4+0", "joint-kept2+0"]
    assert all(len(names[widths]) == 1 for widths in _TILES if widths not in ((64, 64), (128, 128)))


def section_of(seqlen: int, lines: int, group: int = 1, *, deterministic: bool = False) -> int:
    """Lines of a section at head_dim 128, with as many keys as queries."""
    return section_lines(
        backward_tile(128, 128),
        seqlen_q=seqlen,
        group=group,
        lines=lines,
        key_tiles=-(-seqlen // 128),
        num_sms=132,
        deterministic=deterministic,
        finishes=not deterministic,
    )


@given(st.integers(0, 1_000_000), st.integers(1, 64), st.integers(1, 500), st.booleans())
def test_a_section_has_one_line_at_least_and_all_at_most(
    seqlen_q: int, group: int, lines: int, deterministic: bool
) -> None:
    section = section_of(seqlen_q, lines, group, deterministic=deterministic)
    assert 1 <= section <= lines
    assert not deterministic or lines == 1 or section < lines


def test_what_a_section_shares_stays_in_the_l2() -> None:
    assert section_of(1024, 10_000, 8, deterministic=True) == 18  # one would fit; so many keep all SMs busy
    assert section_of(4096, 10_000, deterministic=True) == 5
    assert section_of(200, 10_000) == 34
    assert section_of(16_384, 16, deterministic=True) == 2
    assert section_of(131_072, 8, group=8) == 1


def test_a_section_has_a_tile_for_every_sm_where_no_other_is_finished_with_it() -> None:
    """8k with 4 query heads a key head: one line fits the L2, and its 64 tiles would leave half of the SMs idle."""
    assert section_of(8192, 8, group=4, deterministic=True) == 4  # with 3, the last section would have 2
    assert section_of(512, 10_000, deterministic=True) == 34
    assert section_of(256, 8, group=1000) == 8


def test_sections_of_which_five_have_sums_have_tiles_for_half_of_the_sms() -> None:
    assert section_of(512, 512) == 18
    assert section_of(1024, 256) == 10
    assert section_of(1024, 256, deterministic=True) == 18
    assert section_of(4096, 64) == 4
    assert section_of(8192, 32) == 2
    assert section_of(16_384, 16) == 1


def test_dq_is_finished_two_sections_later_where_there_are_more_than_five() -> None:
    assert held_units(51, 10) == (50, 20)
    assert held_units(50, 10) == (50, 50)


def test_which_kernels_finish_dq() -> None:
    narrow, wide = BackwardOptions(torch.bfloat16, 128, 128), BackwardOptions(torch.bfloat16, 256, 256)
    assert narrow.can_finish(backward_tile(128, 128))
    assert not narrow.can_finish(backward_tile(128, 128, extras=True))
    assert not replace(narrow, parts=True).can_finish(backward_tile(128, 128))
    assert not replace(narrow, deterministic=True).can_finish(backward_tile(128, 128))
    assert not wide.can_finish(backward_tile(256, 256))


def parts_of(
    key_tiles: int, lines: int, group: int, *, tapered: bool, deterministic: bool = False, num_sms: int = 132
) -> int:
    """Parts of a group at head_dim 128, with as many keys as queries."""
    return query_parts(
        backward_tile(128, 128),
        seqlen_q=128 * key_tiles,
        key_tiles=key_tiles,
        lines=lines,
        group=group,
        num_sms=num_sms,
        tapered=tapered,
        deterministic=deterministic,
    )


@given(st.integers(1, 5000), st.integers(1, 512), st.integers(1, 64), st.booleans())
def test_parts_divide_the_group_and_come_only_where_tiles_are_few(
    key_tiles: int, lines: int, group: int, tapered: bool
) -> None:
    parts = parts_of(key_tiles, lines, group, tapered=tapered)
    wanted = 198 if tapered else 132
    assert group % parts == 0
    if key_tiles * lines >= wanted:
        assert parts == 1
    elif parts < group:
        assert key_tiles * lines * parts >= wanted


def test_one_key_head_of_many_queries_fills_the_device() -> None:
    assert parts_of(16, 1, 32, tapered=False) == 16
    assert parts_of(16, 1, 1, tapered=False) == 1


def test_tiles_of_unequal_length_are_shared_out_sooner() -> None:
    """2k with 4 query heads a key head: 128 tiles, the longest of which has the work of two."""
    assert parts_of(16, 8, 4, tapered=False, num_sms=128) == 1
    assert parts_of(16, 8, 4, tapered=True, num_sms=128) == 2


def test_blocks_that_wait_for_their_additions_stay_in_the_l2() -> None:
    lengths = (1408, 2048, 4096)
    assert [parts_of(n // 128, 32, 4, tapered=True, deterministic=True) for n in lengths] == [1, 2, 4]
    assert parts_of(64, 8, 4, tapered=True) == 1
    assert parts_of(64, 8, 4, tapered=False, deterministic=True) == 1


def test_options_choose_the_kernel_and_what_is_compiled_in() -> None:
    small, _ = backward_variant(BackwardOptions(torch.bfloat16, 72, 72))
    large, _ = backward_variant(BackwardOptions(torch.float16, 256, 256, deterministic=True))
    assert (small.kernel, large.kernel) == ("flash_bwd_sm90", "flash_bwd_pair_sm90")
    assert dict(small.defines)["HEAD_DIM"] == 96
    assert dict(small.defines)["BF16"] == 1
    assert dict(large.defines)["BF16"] == 0
    assert dict(large.defines)["DETERMINISTIC"] == 1
    assert small.hot


@pytest.mark.parametrize("option", ["key_mask", "softcap", "alibi", "dropout"])
@pytest.mark.parametrize("width", [64, 128])
def test_options_that_need_registers_have_a_tile_of_their_own(option: str, width: int) -> None:
    plain = BackwardOptions(torch.bfloat16, width, width)
    for tile in backward_tiles(width, width):
        defines = dict(backward_variant(plain, tile)[0].defines)
        assert (defines["APART"], defines["TERMS_FIRST"]) == (tile.apart, tile.terms_first)
        assert (defines["TURNS"], defines["KEPT_K"], defines["KEPT_V"]) == (tile.turns, tile.kept_k, tile.kept_v)
    assert backward_variant(plain)[1] == backward_tile(width, width)
    first, *_, last = backward_tiles(width, width)
    extras = replace(plain, **{option: True})
    assert backward_variant(extras)[1] == last
    with pytest.raises(
        ValueError, match=f"tile {re.escape(str(first))} does not serve .*; {re.escape(str(last))} does"
    ):
        backward_variant(extras, first)


def test_the_covering_set_has_the_default_tiles_and_the_other_set_all_others() -> None:
    others = set(other_tiles())
    assert not others & set(covering_set())
    assert all(variant.hot for variant in others)
    for width in sm90_backward.HEAD_DIM_TILES:
        for tile in backward_tiles(width, width):
            for dtype, deterministic in product((torch.bfloat16, torch.float16), (False, True)):
                options = BackwardOptions(dtype, width, width, deterministic)
                assert (backward_variant(options, tile)[0] in others) == (tile != options.tile)


def test_the_covering_set_has_every_kernel_and_option() -> None:
    variants = list(covering_set())
    kernels = {"flash_bwd_sm90", "flash_bwd_pair_sm90", "flash_bwd_postprocess_sm90"}
    assert {variant.kernel for variant in variants} == kernels
    for option in ("DETERMINISTIC", "PARTS", "KEY_MASK", "SOFTCAP", "ALIBI", "DROPOUT", "LEFT_BOUNDS"):
        for kernel in ("flash_bwd_sm90", "flash_bwd_pair_sm90"):
            assert any(variant.kernel == kernel and dict(variant.defines).get(option) == 1 for variant in variants)


def test_parameters_are_laid_out_as_in_the_kernels() -> None:
    """Offsets of the C++ structures, by hand: eight-byte fields first, so that neither side pads."""
    assert BackwardParams.sums.offset % 8 == 0
    pointers_and_strides = 7 * 8 + 8 * 8 + 5 * 8
    assert ctypes.sizeof(BackwardParams) == BackwardParams.sums.offset + pointers_and_strides + 12 * 4
    assert ctypes.sizeof(RowsOfDqParams) == 3 * 8 + 3 * 8 + 8 + 6 * 4
