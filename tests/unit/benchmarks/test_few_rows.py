"""The comparison of decode and forward on few rows, without a GPU."""

import pytest
import torch

from attention_backend import dispatch
from attention_backend.heuristics.decode import FEW_HOPPER_ROWS
from benchmarks import few_rows


def test_every_cell_has_whole_rows_and_both_kernels_have_some_to_win() -> None:
    found = few_rows.cells([64, 128])

    assert all(cell.rows % cell.group == 0 for cell in found)
    assert {cell.rows <= FEW_HOPPER_ROWS for cell in found} == {True, False}


@pytest.mark.parametrize(("rows", "first"), [(16, "flash_decode"), (24, "flash_fwd_sm90")])
def test_dispatch_asks_the_forward_first_where_rows_are_more_than_a_tile_of_decodes(rows: int, first: str) -> None:
    args = few_rows.Cell(128, 2, 4, 3, 100, rows).problem(torch.device("cpu"))

    assert args.seqlen_q * 4 == rows
    assert dispatch._in_order(args)[0].kernel == first
    assert dispatch.run(args)[0].shape == args.q.shape
