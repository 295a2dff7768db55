"""The arithmetic that shares a decode's keys out: every tile once, every result in a slot of its own."""

from collections import defaultdict

import pytest
from decode_plan import Segment, segments
from hypothesis import given
from hypothesis import strategies as st

from attention_backend.heuristics.decode import (
    beside_blocks,
    decode_config,
    hopper_decode_config,
    hopper_page_rows,
    hopper_stage_bytes,
)
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES, SHARED_MEMORY


@given(
    tiles=st.lists(st.just(0) | st.integers(1, 400), min_size=1, max_size=40),
    heads=st.integers(1, 9),
    parts=st.integers(1, 100),
    min_tiles=st.integers(1, 70),
)
def test_every_tile_is_worked_on_once_and_every_segment_has_its_slot(
    tiles: list[int], heads: int, parts: int, min_tiles: int
) -> None:
    pairs: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    all_segments = list(segments(tiles, heads, parts, min_tiles))
    for s in all_segments:
        pairs[s.batch, s.kv_head].append(s)
    slots = [s.slot for s in all_segments]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < (parts + len(tiles)) * heads
    assert set(pairs) == {(b, h) for b in range(len(tiles)) for h in range(heads) if tiles[b]}
    for (batch, _), own in pairs.items():
        assert [s.slot for s in own] == [own[0].first_slot + i for i in range(len(own))]
        assert all(s.num_segments == len(own) and s.first_slot == own[0].slot for s in own)
        assert [0, *(s.end for s in own)] == [*(s.begin for s in own), tiles[batch]]


@given(parts=st.integers(1, 100), work=st.integers(1, 3000), min_tiles=st.integers(1, 9))
def test_no_block_gets_more_than_its_share(parts: int, work: int, min_tiles: int) -> None:
    done: dict[int, int] = defaultdict(int)
    for s in segments([work], 3, parts, min_tiles):
        done[s.block] += s.end - s.begin
    assert max(done.values()) <= max(min_tiles, -(-work // parts))


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 64])
@pytest.mark.parametrize("kv_bytes", [1, 2])
@pytest.mark.parametrize("tile_v", HEAD_DIM_TILES)
@pytest.mark.parametrize("tile", HEAD_DIM_TILES)
def test_every_tile_fits_into_shared_memory(tile: int, tile_v: int, kv_bytes: int, rows: int) -> None:
    for arch, most in SHARED_MEMORY.items():
        config = decode_config(arch, tile, tile_v, rows, kv_bytes)
        assert config.smem_bytes(tile, tile_v, 1024, kv_bytes) + 1024 <= most
        assert config.rows % 8 == 0
    hopper = hopper_decode_config(tile, tile_v, rows, kv_bytes)
    assert hopper.smem_bytes(tile, tile_v, 1024, kv_bytes) + 1024 <= SHARED_MEMORY["sm_90a"]
    assert hopper.stages > hopper.num_warps // 4, "a tile is on its way while others are computed"
    assert hopper.stages % (hopper.num_warps // 4) == 0, "a stage is always filled for the same four warps"
    assert tile_v % hopper.merge_width == 0
    assert hopper.stages * hopper_stage_bytes(tile, tile_v, kv_bytes) >= 64 * 1024 or hopper.stages == 12


@pytest.mark.parametrize(("kv_heads", "blocks"), [(1, 80), (8, 80), (12, 72), (32, 64), (40, 80), (48, 0), (96, 0)])
def test_blocks_beside_a_chunk_are_as_many_for_every_key_head(kv_heads: int, blocks: int) -> None:
    assert beside_blocks(132, kv_heads) == blocks


@pytest.mark.parametrize(("page", "rows"), [(1, None), (8, None), (16, 16), (48, 16), (64, 64), (96, 32), (256, 64)])
def test_copies_from_pages_are_whole_slices(page: int, rows: int | None) -> None:
    assert hopper_page_rows(page) == rows
