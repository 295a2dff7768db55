"""The comparison of blocks that load keys for each other and for themselves, without a GPU."""

import torch

from attention_backend import dispatch
from attention_backend.heuristics.sm90 import BY_HEADS, BY_ROWS, shares_keys_from
from benchmarks import shared_keys


def test_there_are_cells_on_both_sides_of_each_choice() -> None:
    chosen: dict[tuple[int, str, bool], set[bool]] = {}
    for cell in shared_keys.cells():
        found = shares_keys_from(cell.head_dim, cell.group, causal=cell.causal)
        assert found is not None
        assert found[0] == (BY_HEADS if cell.group % 2 == 0 else BY_ROWS)
        chosen.setdefault((cell.head_dim, found[0], cell.causal), set()).add(cell.keys >= found[1])
    assert all(sides == {True, False} for sides in chosen.values())


def test_problems_are_what_the_cells_say() -> None:
    for page, causal in ((32, True), (0, True), (0, False)):
        cell = shared_keys.Cell(128, 4, 2, 40, 100, page, causal)
        args = cell.problem(torch.device("cpu"))
        assert args.paged == bool(page)
        assert dispatch.run(args)[0].shape == (1, 40, 4, 128)
        assert cell.flops == 4 * 4 * 128 * 40 * (80 if causal else 100)
