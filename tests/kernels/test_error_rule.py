"""The harness itself: the rule accepts plain torch and refuses what is wrong, designs cover, builders keep promises."""

from itertools import combinations

import pytest
import torch

from attention_backend.problem import AttentionArgs

from . import oracle
from .covering import covering
from .error_rule import assert_sums_close, check, poisoned_memory
from .problems import LAYOUTS, Case, build, seen_slots

CPU = torch.device("cpu")


@pytest.fixture
def args() -> AttentionArgs:
    return build(Case(20, 50), CPU)


@pytest.fixture
def good(args: AttentionArgs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = oracle.attention(args)
    return out.to(args.dtype), lse.float()


def test_the_rounded_truth_is_accepted(args: AttentionArgs, good: tuple[torch.Tensor, torch.Tensor]) -> None:
    check(args, good)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_one_wrong_element_is_refused(
    args: AttentionArgs, good: tuple[torch.Tensor, torch.Tensor], value: float
) -> None:
    out, lse = good
    out[1, 7, 3, 5] = value if value != 0.5 else out[1, 7, 3, 5] + 0.1
    with pytest.raises(AssertionError, match=r"at \(1, 7, 3, 5\)"):
        check(args, (out, lse))


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 0.0])
def test_one_wrong_lse_is_refused(args: AttentionArgs, good: tuple[torch.Tensor, torch.Tensor], value: float) -> None:
    out, lse = good
    lse[2, 1, 4] = value
    with pytest.raises(AssertionError, match="lse"):
        check(args, (out, lse))


def test_sums_may_err_as_plain_torch_s_rows_even_where_those_cancel() -> None:
    terms = torch.randn(6, 500, dtype=torch.float64)
    rounded = terms.bfloat16().double()
    lucky = rounded - (rounded - terms).mean(1, keepdim=True)
    assert_sums_close(rounded.sum(1).float(), terms, lucky)


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_one_wrong_sum_is_refused(wrong: float) -> None:
    terms = torch.randn(6, 500, dtype=torch.float64)
    sums = terms.sum(1).float()
    sums[3] += wrong
    with pytest.raises(AssertionError, match="errors of sums"):
        assert_sums_close(sums, terms, terms.bfloat16().double())


def test_a_mask_off_by_one_key_is_refused(args: AttentionArgs) -> None:
    out, lse = oracle.attention(build(Case(20, 50, mask="full"), CPU))
    with pytest.raises(AssertionError):
        check(args, (out.to(args.dtype), lse.float()))


def test_the_oracle_equals_torch_where_they_agree() -> None:
    args = build(Case(40, 40, heads=4, kv_heads=4, dtype="fp32"), CPU)
    q, k, v = (x.double().transpose(1, 2) for x in (args.q, args.k, args.v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(oracle.attention(args)[0], want)


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity() -> None:
    args = build(Case(9, 4, batch=1, sinks=True), CPU)
    out, lse = oracle.attention(args)
    assert not out[0, :5].any()
    assert bool((lse[0, :, :5] == -torch.inf).all())
    assert bool(lse[0, :, 5:].isfinite().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unseen_slots_hold_nan_and_seen_ones_do_not(layout: str) -> None:
    args = build(Case(3, 40, mask="sliding", layout=layout, page=16), CPU)
    seen = seen_slots(args)
    assert bool(args.k[seen].isfinite().all())
    assert bool(args.v[~seen].isnan().all())
    assert bool(args.q.isfinite().all())


def test_uninitialised_memory_is_nan_inside_poisoned_memory_only() -> None:
    with poisoned_memory():
        assert bool(torch.empty(100).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_design_covers_every_allowed_pair() -> None:
    factors = {"a": range(5), "b": range(4), "c": range(3), "d": range(2)}

    def allowed(row: dict[str, int]) -> bool:
        return not (row.get("a") == 0 and row.get("b") == 1)

    rows = covering(factors, allowed)
    assert all(allowed(row) for row in rows)
    assert len(rows) <= 24
    for a, b in combinations(factors, 2):
        pairs = {(row[a], row[b]) for row in rows}
        impossible = 1 if (a, b) == ("a", "b") else 0
        assert len(pairs) == len(factors[a]) * len(factors[b]) - impossible
