"""Many rows that see no key, whole tiles of them, as padding on the left leaves: their output is zero, their lse -inf.

The Hopper forward computes no tile for them; the warps that draw tiles write them, shares of all that there are of 32
sequences.
"""

from dataclasses import replace

import pytest
import torch

from attention_backend.problem import AttentionArgs

from .error_rule import check
from .problems import Case, build

PADDED = (
    Case(600, 600, batch=5),
    Case(600, 600, batch=5, mask="sliding", score="softcap"),
    Case(600, 600, batch=5, heads=2, dim=128, dim_v=128, dtype="fp16", sinks=True),
    Case(500, 500, batch=5, layout="padded", dim=72, dim_v=40),
    Case(400, 400, batch=5, dim=256, dim_v=256, heads=2),
    Case(600, 600, batch=5, layout="bhsd", mask="full"),
    Case(400, 400, batch=40, heads=1, kv_heads=1),
)
LONGER_THAN_KEYS = (
    Case(700, 100, batch=2),
    Case(700, 300, batch=4, layout="varlen"),
    Case(700, 100, batch=4, layout="paged_varlen", dim=128, dim_v=128, heads=2),
)


def padded(case: Case, device: torch.device) -> AttentionArgs:
    """Of each five sequences: no padding, some, half of the keys, nearly all of them and all."""
    args = build(replace(case, sinks=False), device)
    starts = torch.tensor([0, 1, case.sk // 2, case.sk - 1, case.sk], dtype=torch.int32, device=device)
    starts = starts.repeat(case.batch // len(starts))
    sinks = torch.randn(case.heads, device=device) if case.sinks else None
    return replace(args, leftpad_k=starts, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_on_the_left(case: Case, device: torch.device) -> None:
    check(padded(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONGER_THAN_KEYS, ids=str)
def test_more_rows_than_keys(case: Case, device: torch.device) -> None:
    check(build(case, device))
