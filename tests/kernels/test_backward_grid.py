"""Gradients against FlashAttention's error rule, over FlashAttention's shapes and every option, by every kernel.

Two pairwise covering designs, as in test_forward_grid.py: VARIANTS pairs head dims, dtype, layout, mask, score, keys,
heads and sinks (about 90 rows); SHAPES pairs every shape with mask, layout and heads on few kernels.
"""

from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch

from attention_backend.problem import AttentionArgs

from .backward_oracle import check, kernels_for
from .covering import covering
from .problems import MASKS, SCORES, Case, build, possible
from .test_forward_grid import ALL_SHAPES, DIMS, HEADS, SMALL_SHAPES

LAYOUTS = ("dense", "bhsd", "padded", "varlen")
KEYS = ("all", "seqused", "leftpad", "key_mask", "mask_desc")
EDGES = (1, 63, 64, 65, 127, 129, 211)


def _possible(row: dict[str, Any]) -> bool:
    return possible(row.get("keys"), row.get("layout"), row.get("mask"))


def _case(row: dict[str, Any], shape: tuple[int, int], batch: int) -> Case:
    dim, dim_v = row["dims"]
    heads, kv_heads = row["heads"]
    rest = {name: value for name, value in row.items() if name not in ("dims", "heads", "shape")}
    return Case(*shape, batch=batch, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v, **rest)


VARIANTS = covering(
    {
        "dims": DIMS,
        "keys": KEYS,
        "mask": MASKS,
        "layout": LAYOUTS,
        "score": SCORES,
        "heads": HEADS,
        "dtype": ("bf16", "fp16"),
        "sinks": (False, True),
    },
    _possible,
)
SHAPES = covering(
    {
        "shape": ALL_SHAPES,
        "mask": MASKS,
        "layout": LAYOUTS,
        "heads": HEADS,
        "dims": ((64, 64), (128, 128), (256, 256)),
        "dtype": ("bf16", "fp16"),
    },
    _possible,
)


def _variant_cases() -> list[Case]:
    shapes = cycle(shape for shape in ALL_SHAPES if max(shape) <= 1024)
    return [_case(row, shape, 6 if max(shape) < 512 else 3) for row, shape in zip(VARIANTS, shapes, strict=False)]


def _shape_cases() -> list[Case]:
    return [_case(row, row["shape"], 2 if max(row["shape"]) > 1000 else 6) for row in SHAPES]


def _edge_cases() -> list[Case]:
    """Lengths around every tile's edge, on both sides."""
    dims = cycle(((64, 64), (128, 128), (256, 256)))
    masks, layouts = cycle(MASKS), cycle(("dense", "varlen", "bhsd"))
    return [
        Case(sq, sk, batch=2, dim=d, dim_v=dv, mask=mask, layout=layout)
        for (sq, sk), (d, dv), mask, layout in zip(product(EDGES, EDGES), dims, masks, layouts, strict=False)
    ]


def _check(args: AttentionArgs, *, with_lse: bool = False) -> None:
    for kernel in kernels_for(args):
        check(args, kernel, with_lse=with_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", _variant_cases(), ids=str)
def test_gradients_meet_the_error_rule_for_every_pair_of_options(case: Case, device: torch.device) -> None:
    _check(build(case, device), with_lse=case.sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", _shape_cases(), ids=str)
def test_gradients_meet_the_error_rule_for_every_shape(case: Case, device: torch.device) -> None:
    _check(build(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", _edge_cases(), ids=str)
def test_gradients_meet_the_error_rule_around_the_edges_of_tiles(case: Case, device: torch.device) -> None:
    args = build(case, device)
    _check(args)
    _check(replace(args, deterministic=True))


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.17, 0.6])
@pytest.mark.parametrize("dim", [64, 72, 128, 192, 256])
def test_gradients_under_dropout_meet_the_error_rule(p: float, dim: int, device: torch.device) -> None:
    for case in (
        Case(300, 411, batch=2, dim=dim, dim_v=dim),
        Case(257, 130, batch=3, dim=dim, dim_v=dim, layout="varlen", mask="sliding", score="softcap"),
    ):
        seed = torch.tensor([(1 << 61) + 12345, 77], device=device)
        args = build(case, device)
        if args.window_left == 0:  # rows of one key have no gradient of it, but for the rounding of their output
            args = replace(args, window_left=1)
        _check(replace(args, dropout_p=p, dropout_seed=seed))


@pytest.mark.parametrize(
    "case", [_case(row, shape, 2) for row, shape in zip(VARIANTS[::7], cycle(SMALL_SHAPES), strict=False)], ids=str
)
def test_small_gradients_meet_the_error_rule_on_cpu(case: Case) -> None:
    _check(build(case, torch.device("cpu")), with_lse=True)
