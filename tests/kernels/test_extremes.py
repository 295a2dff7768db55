"""Scores, sinks and biases at the ends of their range: nothing overflows, nothing becomes NaN."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention_backend.problem import DESC_COLUMNS, FURTHEST, AttentionArgs

from .error_rule import check, kernels_for, run
from .problems import Case, build

CPU = torch.device("cpu")
BASE = Case(130, 200, batch=2)
DECODE = Case(1, 900, batch=3, layout="paged", dim=128, dim_v=128, heads=8)
NAN_CASES = (
    BASE,
    replace(BASE, dim=128, dim_v=128, sinks=True),
    DECODE,
    replace(DECODE, batch=2, sk=3000, dim=64, dim_v=64),
)


def huge_scores(args: AttentionArgs) -> AttentionArgs:
    """Differences far beyond exp's range: each row's softmax is one key, or a few that tie."""
    return replace(args, q=args.q * 64)


def tiny_scale(args: AttentionArgs) -> AttentionArgs:
    return replace(args, softmax_scale=1e-6)


def sinks_at(value: float) -> Callable[[AttentionArgs], AttentionArgs]:
    def change(args: AttentionArgs) -> AttentionArgs:
        return replace(args, sinks=torch.full((args.num_heads,), value, device=args.q.device))

    change.__name__ = f"sinks_at_{value:g}"
    return change


def hidden_by_bias(value: float) -> Callable[[AttentionArgs], AttentionArgs]:
    """A mask the way models write it: a large negative bias on some keys, never on all of a row's."""

    def change(args: AttentionArgs) -> AttentionArgs:
        sq, sk = args.q.shape[1], args.k.shape[1]
        bias = torch.zeros((1, 1, sq, sk), device=args.q.device)
        bias[..., 3::2] = value
        return replace(args, bias=bias, window_right=-1)

    change.__name__ = f"hidden_by_bias_{value:g}"
    return change


ANYWHERE = [huge_scores, tiny_scale, *map(sinks_at, (-1e30, -50.0, 50.0, 1000.0))]
DENSE_ONLY = [hidden_by_bias(-torch.inf), hidden_by_bias(torch.finfo(torch.float32).min), hidden_by_bias(-1e4)]
CHANGES = [(BASE, change) for change in (*ANYWHERE, *DENSE_ONLY)] + [(DECODE, change) for change in ANYWHERE]


def check_finite_under_a_bias_that_hides_a_whole_row(value: float, device: torch.device) -> None:
    """What such a row should be nobody defines; that it is no NaN and leaves the other rows alone, all expect."""
    args = build(Case(130, 200, batch=1, mask="full"), device)
    bias = torch.zeros((1, 1, 130, 200), device=device)
    bias[:, :, 5] = value
    for name, kernel in kernels_for(replace(args, bias=bias)).items():
        out, _ = run(replace(args, bias=bias), kernel)
        plain, _ = run(replace(args, bias=torch.zeros_like(bias)), kernel)
        assert not out.isnan().any(), name
        others = torch.arange(130, device=device) != 5
        assert torch.equal(out[:, others], plain[:, others]), name


def check_rows_of_nan(case: Case, device: torch.device) -> None:
    """A query of NaN makes its own row NaN, in the output and in lse, as if nobody else were there; it is not taken for
    a row that sees nothing, which has zeros and -inf."""
    args = build(case, device)
    row = (0, case.sq - 1)  # sequence, the longest, and query
    q = args.q.clone()
    q[row] = torch.nan
    for name, kernel in kernels_for(args).items():
        (want, want_lse), (out, lse) = (run(x, kernel) for x in (args, replace(args, q=q)))
        assert bool(out[row].isnan().all()), name
        assert bool(lse[row[0], :, row[1]].isnan().all()), name
        for got, expected in ((out, want), (lse.transpose(1, 2), want_lse.transpose(1, 2))):
            got[row], expected[row] = 0, 0
            assert torch.equal(got, expected), name


def check_descriptors(rows: int, device: torch.device) -> None:
    """Windows and chunks as far as they may be, and starts before the first key, which are the first key."""
    far, keys = FURTHEST, 80
    masks = ((0, -1, far, 0), (0, far, 0, 0), (3, far, far, far), (-3, -1, -1, 8), (-3, -1, 0, 8), (-5, 4, far, 16))
    args = build(Case(rows, keys, batch=len(masks), mask="full"), device)
    desc = torch.zeros((len(masks), DESC_COLUMNS), dtype=torch.int32)
    for row, (start, left, right, chunk) in zip(desc, masks, strict=True):
        row[:6] = torch.tensor([start, keys, keys - rows, left, right, chunk])
    check(replace(args, mask_desc=desc.to(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70])
def test_descriptors_at_the_ends_of_their_range(rows: int, device: torch.device) -> None:
    check_descriptors(rows, device)


@pytest.mark.parametrize("rows", [1, 70])
def test_descriptors_at_the_ends_of_their_range_on_cpu(rows: int) -> None:
    check_descriptors(rows, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("case", "change"), CHANGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_extremes_meet_the_error_rule(
    case: Case, change: Callable[[AttentionArgs], AttentionArgs], dtype: str, device: torch.device
) -> None:
    check(change(build(replace(case, dtype=dtype), device)))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_row_hidden_by_its_bias_is_no_nan(value: float, device: torch.device) -> None:
    check_finite_under_a_bias_that_hides_a_whole_row(value, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_rows_of_nan_are_nan_and_leave_others_alone(case: Case, dtype: str, device: torch.device) -> None:
    check_rows_of_nan(replace(case, dtype=dtype), device)


@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_rows_of_nan_are_nan_on_cpu(case: Case) -> None:
    check_rows_of_nan(replace(case, dtype="fp32"), CPU)


@pytest.mark.parametrize(("case", "change"), CHANGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_extremes_meet_the_error_rule_on_cpu(case: Case, change: Callable[[AttentionArgs], AttentionArgs]) -> None:
    check(change(build(case.with_shape(min(case.sq, 20), min(case.sk, 60)), CPU)))


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_row_hidden_by_its_bias_is_no_nan_on_cpu(value: float) -> None:
    check_finite_under_a_bias_that_hides_a_whole_row(value, CPU)
