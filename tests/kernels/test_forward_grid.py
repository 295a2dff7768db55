"""The forward against FlashAttention's error rule, over FlashAttention's shapes and every option of the problem.

The full product has millions of cells and every (dtype, head-dim tiles, paged, options) combination is a kernel to
compile, so two pairwise covering designs share the work:

* VARIANTS pairs head dims x dtype x layout x mask x score x keys x heads x sinks (every two levels of two factors meet)
  and runs each row on two shapes, rotating through FlashAttention's list. About 130 rows, as many kernels: a minute or
  two when the kernel cache is cold.
* SHAPES pairs every (sq, sk) of FlashAttention 2's and 3's tests x mask x layout x heads on head dims 64 and 128
  without score options, so that it needs eight kernels. About 200 rows, under a minute.

`slow` runs the product of head dims x dtype x score x keys instead (about 900 kernels, 10 minutes cold); choose a part
with `-k "d64/64"`.
"""

from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch

from .covering import covering
from .error_rule import check
from .problems import KEYS, LAYOUTS, MASKS, SCORES, Case, build, possible

FA2_SHAPES = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
FA3_SHAPES = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip
CROSS_SHAPES = ((1, 300), (3, 1024), (17, 64), (64, 17), (129, 1025))
ALL_SHAPES = tuple(dict.fromkeys(FA2_SHAPES + FA3_SHAPES + CROSS_SHAPES))
SMALL_SHAPES = ((5, 17), (33, 70), (1, 1), (64, 40), (70, 3))

DIMS = tuple((d, d) for d in (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256))
DIMS += ((192, 128), (24, 16), (96, 64))
HEADS = ((6, 6), (6, 2), (6, 1), (8, 2))  # MHA, GQA, MQA, and a group of four
PAGES = (64, 16, 128, 48)


def _possible(row: dict[str, Any]) -> bool:
    return possible(row.get("keys"), row.get("layout"), row.get("mask"))


def _case(row: dict[str, Any], shape: tuple[int, int], index: int, **changes: Any) -> Case:
    dim, dim_v = row["dims"]
    heads, kv_heads = row["heads"]
    rest = {name: value for name, value in row.items() if name not in ("dims", "heads", "shape")}
    options = {"page": PAGES[index % len(PAGES)], "hnd": index % 3 != 0} | rest | changes
    return Case(*shape, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v, **options)


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
        "dims": ((64, 64), (128, 128)),
        "dtype": ("bf16", "fp16"),
    },
    _possible,
)


def _variant_cases() -> list[Case]:
    shapes = cycle(shape for shape in ALL_SHAPES if max(shape) <= 1024)
    return [
        _case(row, shape, i, batch=6 if max(shape) < 512 else 3)
        for i, row in enumerate(VARIANTS)
        for shape in islice(shapes, 2)
    ]


def _shape_cases() -> list[Case]:
    return [
        _case(row, row["shape"], i, batch=2 if max(row["shape"]) > 2048 else 9 if max(row["shape"]) < 1000 else 3)
        for i, row in enumerate(SHAPES)
    ]


def _product_cases() -> list[Case]:
    """Every head dim, dtype, score and kind of keys; layout, mask and heads rotate through what goes together."""
    cases = []
    shapes = cycle(((113, 203), (256, 512), (512, 256), (128, 217)))
    for i, (dims, dtype, score, keys) in enumerate(product(DIMS, ("bf16", "fp16"), SCORES, KEYS)):
        rest = [(lay, mask) for lay, mask in product(LAYOUTS, MASKS) if possible(keys, lay, mask)]
        layout, mask = rest[i % len(rest)]
        row = {"dims": dims, "dtype": dtype, "score": score, "keys": keys, "layout": layout, "mask": mask}
        cases.append(_case(row | {"heads": HEADS[i % len(HEADS)], "sinks": i % 2 == 1}, next(shapes), i))
    return cases


def _small_cases() -> list[Case]:
    """The same rows on shapes a CPU does in milliseconds: every ninth, all options and layouts among them."""
    shapes = cycle(SMALL_SHAPES)
    return [_case(row, next(shapes), i, batch=2) for i, row in enumerate(VARIANTS) if i % 9 == 0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", _variant_cases(), ids=str)
def test_every_pair_of_options_meets_the_error_rule(case: Case, device: torch.device) -> None:
    check(build(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", _shape_cases(), ids=str)
def test_every_shape_meets_the_error_rule(case: Case, device: torch.device) -> None:
    check(build(case, device))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", _product_cases(), ids=str)
def test_the_product_of_options_meets_the_error_rule(case: Case, device: torch.device) -> None:
    check(build(case, device))


@pytest.mark.parametrize("case", _small_cases(), ids=str)
def test_small_problems_meet_the_error_rule_on_cpu(case: Case) -> None:
    check(build(case, torch.device("cpu")))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_dtype_meets_the_error_rule_on_cpu(dtype: str) -> None:
    check(build(replace(Case(33, 70), dtype=dtype), torch.device("cpu")))
