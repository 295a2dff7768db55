"""Slots that no row may see never reach the result: whatever they hold, the output is bitwise that of zeros there."""

import math
from dataclasses import replace

import pytest
import torch

from .error_rule import kernels_for, run
from .problems import Case, build, fill_unseen

CPU = torch.device("cpu")
CASES = (
    Case(100, 300, batch=5, layout="paged_varlen", page=64),
    Case(100, 300, batch=5, layout="paged_varlen", page=16, keys="leftpad"),
    Case(100, 300, batch=5, layout="paged", page=48, mask="sliding"),
    Case(1, 300, batch=5, layout="paged", page=64),
    Case(4, 300, batch=5, layout="paged", page=16, keys="leftpad", mask="sliding", dim=128, dim_v=128),
    Case(1, 3000, batch=2, layout="paged", page=64, num_splits=3),
    Case(1, 300, batch=5, keys="seqused"),
    Case(200, 300, batch=3, keys="leftpad"),
    Case(200, 300, batch=3, keys="key_mask"),
    Case(200, 300, batch=3, keys="mask_desc", mask="full"),
    Case(130, 300, batch=3, keys="seqused", mask="chunk"),
    Case(77, 300, batch=3, layout="padded", dim=72, dim_v=40, mask="sliding"),
    Case(100, 300, batch=3, keys="seqused", score="softcap_alibi"),
    Case(200, 300, batch=6, layout="varlen", keys="seqused", dim=128, dim_v=128),
    Case(200, 300, batch=6, layout="varlen", mask="sliding"),
    Case(200, 300, batch=3, keys="seqused", dim=256, dim_v=256, mask="full"),
    Case(200, 300, batch=3, layout="paged", dim=256, dim_v=256, page=128),
    Case(200, 300, batch=3, layout="paged_varlen", dim=128, dim_v=128, mask="full"),
)
SMALL = tuple(c.with_shape(min(c.sq, 9), min(c.sk, 70)) for c in CASES)


def check_unused_slots(case: Case, device: torch.device) -> None:
    args = build(case, device)
    big = 1e38 if case.torch_dtype == torch.bfloat16 else torch.finfo(case.torch_dtype).max
    for name, kernel in kernels_for(args).items():
        fill_unseen(args, 0.0, 0.0)
        want, want_lse = run(args, kernel)
        assert bool(want.isfinite().all())
        for value in (math.nan, math.inf, -math.inf, big, -big):
            for k_value, v_value in ((value, value), (0.0, value), (value, 0.0)):
                fill_unseen(args, k_value, v_value)
                out, lse = run(args, kernel)
                assert torch.equal(out, want), f"{name}: unused slots with k={k_value}, v={v_value} changed the output"
                assert torch.equal(lse, want_lse), f"{name}: unused slots with k={k_value}, v={v_value} changed lse"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unused_slots_change_no_bit(case: Case, dtype: str, device: torch.device) -> None:
    check_unused_slots(replace(case, dtype=dtype), device)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_unused_slots_change_no_bit_on_cpu(case: Case) -> None:
    check_unused_slots(case, CPU)
