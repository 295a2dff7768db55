"""Warpgroups of the Hopper forward that leave out what none of their own rows sees, also where they are not chosen."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention_backend.kernels import flash_fwd_sm90

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


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_error_rule(dim: int, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, own=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 256])
def test_a_narrower_head_dim_is_padded(dim: int, hopper: torch.device) -> None:
    args = build(Case(257, 257, dim=dim - 8, dim_v=dim - 16, layout="padded"), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, own=True)))
