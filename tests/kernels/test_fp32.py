"""float32 is served exactly (1e-5 of the largest value) or refused by an error that lists what is served."""

from dataclasses import replace

import pytest
import torch

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs

from . import oracle
from .error_rule import assert_lse_close, run
from .problems import Case, build

CASES = tuple(
    replace(case, dtype="fp32")
    for case in (
        Case(113, 203),
        Case(256, 256, mask="full", heads=4, kv_heads=4, dim=128, dim_v=128),
        Case(100, 300, layout="varlen", mask="sliding", batch=6),
        Case(64, 300, layout="paged_varlen", page=16, batch=6),
        Case(1, 700, layout="paged", batch=3, dim=128, dim_v=128),
        Case(120, 90, score="softcap_alibi", sinks=True),
        Case(77, 177, keys="bias_float", mask="full"),
        Case(77, 177, keys="key_mask", dim=80, dim_v=80),
        Case(40, 177, keys="mask_desc", mask="full", dim=40, dim_v=24),
        Case(129, 257, keys="leftpad", mask="chunk", dim=256, dim_v=256),
    )
)


def refusal_of(args: AttentionArgs) -> str | None:
    try:
        dispatch.select(args)
    except NotImplementedError as error:
        return str(error)
    return None


def check_exact(case: Case, device: torch.device) -> None:
    args = build(case, device)
    refusal = refusal_of(args)
    if refusal is not None:
        assert "float16" in refusal, "the refusal must list the dtypes that are served"
        assert "bfloat16" in refusal
        return
    out, lse = run(args)
    truth, truth_lse = oracle.attention(args)
    assert (out - truth).abs().max() <= 1e-5 * truth.abs().max()  # zeros, both, where no row sees a key
    assert_lse_close(lse, truth_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_exact_or_refused_by_name(case: Case, device: torch.device) -> None:
    check_exact(case, device)


@pytest.mark.parametrize("case", [c.with_shape(min(c.sq, 20), min(c.sk, 60)) for c in CASES], ids=str)
def test_float32_is_exact_on_cpu(case: Case) -> None:
    check_exact(case, torch.device("cpu"))
