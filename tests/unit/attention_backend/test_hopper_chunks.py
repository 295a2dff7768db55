"""Which chunks of a prompt the Hopper forward lays into pairs of packed tiles: arithmetic only."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention_backend.heuristics import sm90
from attention_backend.heuristics.sm90 import LONG, HopperPlan, HopperSizes
from attention_backend.heuristics.sm90_chunks import FEW_SEQUENCES, PAIRS_KEYS
from attention_backend.jit import KernelVariant
from attention_backend.kernels import device, flash_fwd_sm90
from attention_backend.kernels.hopper_variants import HopperOptions, hopper_layout, hopper_variant
from attention_backend.kernels.step_kernels import step_variants
from attention_backend.kernels.variants import Options
from benchmarks.shared_keys import PAGE, Cell


def form_of(rows: int, keys: int, *, width: int = 128, **others: Any) -> tuple[bool, HopperPlan] | None:
    """Whether tiles have 192 rows, and the plan. 32 heads on 8, on a GPU of 132 SMs."""
    which = HopperOptions(Options(torch.bfloat16, width, width, paged=True), long=True, page_size=PAGE)
    sizes = HopperSizes(rows, keys, 1, 32, 4, 132, packable=True, causal=True)._replace(**others)
    layout = hopper_layout(which)
    if width == 128:
        which = which._replace(tall=sm90.is_tall(layout.tiles, layout.config, sizes))
    found = flash_fwd_sm90._in_pairs(which, sizes)
    return None if found is None else (found[0].tall, found[1])


def step_kernels(width: int, most_keys: int) -> Iterator[KernelVariant]:
    return step_variants("sm_90a", torch.bfloat16, width, width, group=4, page_size=PAGE, most_keys=most_keys)


@pytest.mark.parametrize(
    ("rows", "tall", "parts"),
    [(121, False, 4), (192, True, 4), (249, False, 2), (377, True, 2), (1529, True, 1), (2048, True, 3)],
)
def test_as_many_rows_as_fill_pairs_have_those(rows: int, tall: bool, parts: int) -> None:
    """As measured on an H200: 249 rows are 2.6 pairs of tiles of 192 packed rows, and 3.9 of 128."""
    assert form_of(rows, 100_000) == (tall, HopperPlan(True, 192 if tall else 128, parts))


def test_pairs_whose_second_tile_would_be_empty_are_not_taken() -> None:
    """20 rows are 80 packed ones, which one tile of 128 holds; 64 are 256, a whole pair."""
    assert form_of(20, 100_000) is None
    assert form_of(64, 100_000) is not None


def test_few_keys_many_rows_and_given_parts_have_none() -> None:
    assert form_of(249, PAIRS_KEYS - 1) is None
    assert form_of(sm90.SHARED_QUERIES + 1, 100_000) is None
    for others in ({"num_splits": 1}, {"partial": True}, {"packable": False}, {"group": 1}, {"group": 200}):
        assert form_of(249, 100_000, **others) is None


def test_of_few_sequences_one_has_nearly_all_rows() -> None:
    """As in a recorded step of 384 rows, whose parts the device chooses."""
    form = form_of(384, 131_072, batch=3, total_rows=384)
    assert form == (True, HopperPlan(True, 192, sm90.FEW_SPLITS, chosen=True))
    assert form_of(384, 131_072, batch=FEW_SEQUENCES + 1, total_rows=384) is None
    assert form_of(1500, 131_072, batch=3, total_rows=4500) is None, "many rows"


def test_wide_heads_have_pairs_of_128_rows() -> None:
    form = form_of(249, 100_000, width=256)
    assert form == (False, HopperPlan(True, 128, 2))


def test_the_forward_takes_them_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_sms", lambda _: 132)
    args = Cell(128, 32, 8, 249, 40_249, PAGE).problem(torch.device("cpu"))
    which, plan = flash_fwd_sm90._plan(args, False, 0)
    assert hopper_variant(which, pack=True, split=True) in set(step_kernels(128, PAIRS_KEYS))
    assert not any(("CLUSTER_HEADS", 0) in v.defines and ("CLUSTER", 2) in v.defines for v in step_kernels(128, LONG))
    assert (which.cluster, plan) == (sm90.BY_ROWS, HopperPlan(True, 128, 2))
    for told in ({"own": False}, {"cluster": sm90.ALONE}, {"tall": False}, {"pack": True}):
        assert flash_fwd_sm90._plan(args, False, 0, **told)[0].cluster == sm90.ALONE
