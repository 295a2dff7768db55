"""Warpgroups of the Hopper forward that leave out what none of their own rows sees, also where they are not chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from attention_backend.heuristics.sm90 import ALONE, BY_HEADS, BY_ROWS
from attention_backend.kernels import device, flash_fwd_sm90
from attention_backend.kernels.hopper_variants import HopperOptions, hopper_layout
from attention_backend.kernels.variants import Options

from .error_rule import check, run
from .problems import Case, build

LENGTHS = (1, 63, 64, 65, 127, 129, 257, 331, 512)
EVEN = [
    Case(n, n, batch=2, heads=4, kv_heads=2 if n % 2 else 4, mask=mask, dtype="fp16" if n % 3 == 0 else "bf16")
    for n in LENGTHS
    for mask in ("causal", "full")
]
#: More keys than rows, more rows than keys, ends and gaps of masks within a warpgroup's rows, rows that see nothing.
UNEVEN = [
    Case(70, 331, batch=2, heads=4, kv_heads=2),
    Case(331, 70, batch=2, heads=4, kv_heads=1),
    Case(192, 320, batch=2, mask="full"),
    *(Case(300, 350, heads=2, kv_heads=1, layout="varlen", mask=m) for m in ("causal", "sliding", "window", "chunk")),
    *(Case(300, 350, heads=2, kv_heads=1, mask=m, sinks=True) for m in ("lookahead", "sliding", "chunk")),
    Case(200, 260, keys="seqused", heads=2),
    Case(260, 260, keys="leftpad", heads=2),
]


PAGED = [
    Case(rows, keys, batch=3, layout="paged_varlen", page=page, mask=mask)
    for rows, keys, mask in ((1, 129, "causal"), (200, 331, "causal"), (331, 331, "sliding"), (70, 500, "chunk"))
    for page in (16, 32, 48, 128)
]


@contextmanager
def only_plans() -> Iterator[None]:
    """No launch: what is refused is refused before. A CPU has no multiprocessors to count."""
    with mock.patch.object(device, "num_sms", return_value=132):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN + PAGED, ids=str)
@pytest.mark.parametrize("dim", [64, 72, 96, 128])
def test_tiles_of_192_rows(dim: int, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, tall=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["key_mask", "bias_float", "bias_element", "mask_desc"])
def test_tiles_of_192_rows_under_masks_and_biases(keys: str, hopper: torch.device) -> None:
    args = build(Case(430, 530, batch=2, heads=4, kv_heads=2, dim=128, dim_v=128, keys=keys, mask="full"), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, tall=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_tiles_of_192_rows_packed_and_in_parts(dim: int, splits: int, hopper: torch.device) -> None:
    for rows, keys, page in ((40, 900, 32), (170, 700, 16), (300, 900, 48)):
        case = Case(rows, keys, batch=2, heads=8, kv_heads=2, layout="paged_varlen", page=page, dim=dim, dim_v=dim)
        args = build(replace(case, num_splits=splits), hopper)
        check(args, run(args, partial(flash_fwd_sm90.forward, tall=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("group", [3, 4])
def test_forms_of_a_chunk(group: int, tall: bool, pack: bool, hopper: torch.device) -> None:
    for rows, keys, splits in ((70, 700, 0), (100, 1300, 3)):
        case = Case(rows, keys, heads=2 * group, kv_heads=2, layout="paged_varlen", page=32, dim=128, dim_v=128)
        args = build(replace(case, num_splits=splits), hopper)
        check(args, run(args, partial(flash_fwd_sm90.forward, cluster=ALONE, own=False, tall=tall, pack=pack)))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("group", [3, 4])
def test_pairs_of_packed_tiles(group: int, tall: bool, splits: int, hopper: torch.device) -> None:
    """An odd number of tiles, sequences of one tile and of a few rows, more rows than keys."""
    for rows, keys in ((70, 700), (3, 500), (130, 90)):
        case = Case(rows, keys, batch=3, heads=2 * group, kv_heads=2, layout="paged_varlen", page=32, num_splits=splits)
        args = build(replace(case, dim=128, dim_v=128), hopper)
        check(args, run(args, partial(flash_fwd_sm90.forward, cluster=BY_ROWS, tall=tall, pack=True)))


def test_rows_of_a_group_are_packed_where_there_is_one_and_scores_allow_it() -> None:
    single = Case(100, 300, heads=2, kv_heads=2, dim=128, dim_v=128)
    for case in (single, replace(single, heads=4, score="alibi")):
        with pytest.raises(ValueError, match="no tile holds the rows of"), only_plans():
            flash_fwd_sm90.forward(build(case, torch.device("cpu")), pack=True)
    args = build(replace(single, heads=4), torch.device("cpu"))
    for asked in (partial(flash_fwd_sm90.forward, own=True), partial(flash_fwd_sm90.forward, cluster=BY_HEADS)):
        with pytest.raises(ValueError, match="no tile holds the rows of"), only_plans():
            asked(args, pack=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_error_rule(dim: int, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, own=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN + PAGED, ids=str)
@pytest.mark.parametrize("dim", [120, 128, 256])
def test_blocks_that_load_keys_for_each_other_s_rows(dim: int, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, cluster=BY_ROWS)))
    if dim <= 128:
        check(args, run(args, partial(flash_fwd_sm90.forward, cluster=BY_ROWS, tall=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN + PAGED, ids=str)
@pytest.mark.parametrize(("dim", "group"), [(120, 2), (128, 4), (256, 2)])
def test_blocks_that_load_keys_for_each_other_s_heads(dim: int, group: int, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, heads=2 * group, kv_heads=2, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, cluster=BY_HEADS)))
    if dim <= 128:
        check(args, run(args, partial(flash_fwd_sm90.forward, cluster=BY_HEADS, tall=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("dim", [80, 128])
def test_wide_tiles_over_pages(dim: int, page: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many keys, which pages of 48, 64 and 128 do not divide."""
    monkeypatch.setattr(flash_fwd_sm90, "LONG", 1)
    wide = HopperOptions(Options(torch.bfloat16, dim, dim, paged=True), long=True, page_size=page)
    assert hopper_layout(wide).config.block_n == 160
    for rows, keys, mask, splits in ((70, 331, "causal", 1), (200, 700, "sliding", 1), (40, 900, "causal", 3)):
        case = Case(rows, keys, batch=2, heads=4, kv_heads=2, layout="paged_varlen", page=page, mask=mask, dim=dim)
        args = build(replace(case, dim_v=dim, num_splits=splits), hopper)
        check(args, run(args, partial(flash_fwd_sm90.forward, tall=False)))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "seqlen"), [(128, 8192), (256, 2048)])
def test_they_do_where_that_is_faster(dim: int, seqlen: int, hopper: torch.device) -> None:
    """The same products in the same order: the same bits as of blocks that load for themselves."""
    args = build(Case(seqlen, seqlen, batch=2, heads=9, kv_heads=9, dim=dim, dim_v=dim, mask="full"), hopper)
    chosen, shared, alone = (flash_fwd_sm90.forward(args, cluster=cluster) for cluster in (None, BY_ROWS, ALONE))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(chosen, shared, alone, strict=True))


def test_blocks_load_keys_for_heads_of_an_even_group_alone() -> None:
    for heads, kv_heads in ((4, 4), (6, 2)):  # one and three of a key head
        args = build(Case(200, 200, heads=heads, kv_heads=kv_heads, dim=128, dim_v=128), torch.device("cpu"))
        with pytest.raises(ValueError, match="no pairs of heads"), only_plans():
            flash_fwd_sm90.forward(args, cluster=BY_HEADS)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 256])
def test_a_narrower_head_dim_is_padded(dim: int, hopper: torch.device) -> None:
    args = build(Case(257, 257, dim=dim - 8, dim_v=dim - 16, layout="padded"), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, own=True)))
