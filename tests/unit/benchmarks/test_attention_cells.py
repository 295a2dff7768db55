"""The attention benchmark's cells: how their work is counted, and which ones there are."""

from dataclasses import replace

import pytest

from benchmarks.attention_cells import Cell, dense_twin
from benchmarks.attention_grid import (
    DECODE,
    GRID,
    SECTIONS,
    SHARED,
    decode_cells,
    forward_cells,
    long_tailed_lengths,
    padding_cells,
    quick,
    select,
    varlen_cells,
)


def test_a_full_forward_counts_four_operations_a_pair_and_element() -> None:
    assert Cell("forward", 2, 100, 200, 8, 4, 64, False).flops == 4 * 2 * 8 * 100 * 200 * 64


def test_a_causal_square_counts_half() -> None:
    full = Cell("forward", 1, 2048, 2048, 32, 32, 64, False)
    assert replace(full, causal=True).flops * 2 == full.flops


def test_a_backward_counts_two_and_a_half_times_the_forward() -> None:
    forward = Cell("forward", 2, 1024, 1024, 8, 8, 64, True)
    assert 2 * replace(forward, section="backward").flops == 5 * forward.flops


def test_a_chunk_on_a_prefix_counts_the_prefix_fully() -> None:
    chunk = Cell("paged", 1, 100, 300, 1, 1, 1, True)
    assert chunk.flops == 4 * (100 * 200 + 100 * 100 // 2)


def test_ragged_sequences_count_their_own_squares() -> None:
    ragged = Cell("varlen", 3, 30, 30, 2, 2, 8, False, lengths=(10, 20, 30))
    assert ragged.pairs == 100 + 400 + 900
    assert replace(ragged, causal=True).pairs == 700
    assert ragged.kv_tokens == ragged.rows == 60


def test_padding_counts_only_keys_in_use() -> None:
    padded = Cell("padding", 2, 100, 100, 1, 1, 8, False, lengths=(40, 60))
    assert padded.pairs == 100 * (40 + 60)
    assert replace(padded, causal=True).pairs == (40 * 40 + 60 * 60) // 2
    assert padded.kv_tokens == 200


def test_a_sparse_cell_counts_its_share_of_the_pairs() -> None:
    assert Cell("block_sparse", 1, 1024, 1024, 1, 1, 8, False, density=0.25).pairs == 1024 * 1024 // 4


def test_kv_bytes_are_keys_and_values_in_two_bytes() -> None:
    assert Cell("decode", 16, 1, 131072, 32, 8, 128, False).kv_bytes == 16 * 131072 * 8 * 128 * 2 * 2


def test_shared_keys_are_stored_once() -> None:
    assert SHARED.kv_tokens == 99_968 + 64 * 632
    assert SHARED.shared % SHARED.page == 0
    assert SHARED.seqlen_k == 100_000 + 600


def test_the_forward_grid_is_the_published_one() -> None:
    cells = list(forward_cells())
    assert len(cells) == 3 * 2 * 7 + 6
    assert Cell("forward", 32, 512, 512, 32, 32, 64, True) in cells
    assert Cell("forward", 1, 32768, 32768, 8, 8, 256, False) in cells
    assert Cell("forward", 1, 8192, 8192, 32, 8, 128, True) in cells


def test_decode_has_the_published_rows() -> None:
    assert [(c.batch, c.seqlen_k) for c in decode_cells()] == list(DECODE)


def test_contiguous_keys_of_pages_need_whole_ones() -> None:
    cells = [c for c in select(SECTIONS, None, None) if c.page]
    assert cells
    assert all(c.seqlen_k % c.page == 0 for c in cells if c.section != "shared_prefix")


def test_lengths_have_a_long_tail_and_are_always_the_same() -> None:
    lengths = long_tailed_lengths()
    assert len(lengths) == 64
    assert max(lengths) == 16384
    assert sorted(lengths)[32] == pytest.approx(1024, rel=0.05)
    assert sum(n > 4096 for n in lengths) < 10
    assert lengths == long_tailed_lengths()


def test_half_the_keys_of_padding_cells_are_padding() -> None:
    for cell in padding_cells():
        assert sum(cell.lengths) / (cell.batch * cell.seqlen_k) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("cell", [c for s in ("varlen", "padding", "chunk", "paged") for c in GRID[s]()], ids=str)
def test_a_dense_twin_has_nearly_the_same_work(cell: Cell) -> None:
    twin = dense_twin(cell)
    assert twin.flops == pytest.approx(cell.flops, rel=0.12)
    assert twin.seqlen_q == twin.seqlen_k
    assert twin.page == twin.shared == 0
    assert twin.lengths == ()


def test_the_twin_of_ragged_sequences_has_their_tokens_too() -> None:
    cell = next(iter(varlen_cells()))
    assert dense_twin(cell).rows == pytest.approx(cell.rows, rel=0.1)


def test_a_512_token_chunk_on_131k_is_held_against_8k_squared() -> None:
    cell = next(c for c in GRID["chunk"]() if c.seqlen_q == 512)
    assert cell.seqlen_k == 131072 + 512
    assert (dense_twin(cell).seqlen_q, dense_twin(cell).causal) == (8192, False)


def test_quick_keeps_cells_of_every_section() -> None:
    assert {c.section for c in quick(select(SECTIONS, None, None))} == set(SECTIONS)


def test_choosing_dimensions_narrows_the_grid() -> None:
    cells = select(("forward", "decode"), [64], [8192])
    assert {(c.head_dim, c.seqlen_k) for c in cells} == {(64, 8192)}
    assert {c.section for c in cells} == {"forward", "decode"}


def test_lengths_and_dimensions_beyond_the_grid_can_be_asked_for() -> None:
    assert [c.heads for c in select(("forward",), [96], [65536])] == [21, 21]


@pytest.mark.parametrize("cell", [next(iter(GRID[s]())) for s in SECTIONS], ids=lambda c: c.section)
def test_a_cell_comes_back_from_its_facts(cell: Cell) -> None:
    facts = cell.facts()
    facts["lengths"] = list(cell.lengths)  # as JSON has them
    assert Cell.of(facts | {"results": {}}) == cell


def test_no_two_cells_are_the_same() -> None:
    cells = select(SECTIONS, None, None)
    assert len(set(cells)) == len(cells)
    assert len({str(c) for c in cells}) == len(cells)
