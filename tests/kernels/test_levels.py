"""Scores that rise and fall by many powers of two along the keys: the Hopper forward's levels follow only so far.

Keys are walked from the last to the first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from attention_backend.heuristics.sm90 import BY_ROWS
from attention_backend.kernels import flash_fwd_sm90
from attention_backend.problem import AttentionArgs

from .error_rule import check, run
from .problems import Case, build

#: What is added to a row's scores at a key (log2), by the key's place: 0 for the first walked, 1 for the last.
PROFILES: dict[str, Callable[[Tensor], Tensor]] = {
    "rising": lambda x: 300 * x,
    "rising by 2^60": lambda x: 60 * x,
    "rising by 2^13": lambda x: 13 * x,
    "falling": lambda x: -300 * x,
    "far below zero, rising": lambda x: 200 * x - 300,
    "far below zero, less so from a tile on": lambda x: -250.0 + 200 * (x > 0.36),  # of CASE's 1,000 keys the first 640
    "one key far above": lambda x: 120.0 * (x == 1),
    "up and down": lambda x: 100 * (20 * x).sin(),
}
CASE = Case(130, 1000, batch=1, heads=2, kv_heads=1)


def shaped(args: AttentionArgs, profile: str) -> AttentionArgs:
    """The dense problem with `profile` along its keys, the same for all rows."""
    dim, keys = args.q.shape[-1], args.k.shape[1]
    heights = PROFILES[profile](torch.arange(keys - 1, -1, -1, device=args.k.device).double() / (keys - 1))
    axis = torch.zeros(dim, dtype=torch.float64, device=args.q.device)
    axis[::3] = 1.0
    q, k = args.q.double(), args.k.double()
    along = (q @ axis / axis.square().sum())[..., None]
    q = q - along * axis + axis  # products with the axis are all the same
    k = k + axis * (heights / (args.softmax_scale * 1.4426950408889634 * axis.square().sum()))[None, :, None, None]
    return replace(args, q=q.to(args.dtype), k=k.to(args.dtype))


def check_rows_of_their_own(dim: int, dtype: str, device: torch.device) -> None:
    """A row's bits do not depend on the rows that share its warp, one of which has far larger scores."""
    args = build(replace(CASE, dim=dim, dim_v=dim, dtype=dtype), device)
    q = args.q.clone()
    q[:, 70:] *= 1000
    want, got = (run(x, flash_fwd_sm90.forward) for x in (args, replace(args, q=q)))
    assert torch.equal(got[0][:, :70], want[0][:, :70])
    assert torch.equal(got[1][..., :70], want[1][..., :70])
    assert not torch.equal(got[1][..., 70:], want[1][..., 70:])


def check_rows_beside_nan(dim: int, dtype: str, device: torch.device) -> None:
    """Row 12 shares its threads with row 4, whose scores are NaN, and its warp with rows of zeros: its level must
    follow its own scores."""
    args = shaped(build(replace(CASE, dim=dim, dim_v=dim, dtype=dtype), device), "rising")
    q = args.q.clone()
    q[:, :12] = q[:, 13:16] = 0
    want = run(replace(args, q=q.clone()), flash_fwd_sm90.forward)
    q[:, 4] = torch.nan
    got = run(replace(args, q=q), flash_fwd_sm90.forward)
    others = torch.arange(q.shape[1], device=device) != 4
    assert bool(want[0].isfinite().all())
    assert bool(got[0][:, 4].isnan().all()), "nobody takes it for a row that sees nothing"
    assert bool(got[1][..., 4].isnan().all())
    assert torch.equal(got[0][:, others], want[0][:, others])
    assert torch.equal(got[1][..., others], want[1][..., others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_are_their_own(dim: int, dtype: str, hopper: torch.device) -> None:
    check_rows_of_their_own(dim, dtype, hopper)
    check_rows_beside_nan(dim, dtype, hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_error_rule(mask: str, dim: int, dtype: str, profile: str, hopper: torch.device) -> None:
    for rows, keys in ((130, 1000), (1, 1500), (2000, 2000)):
        case = replace(CASE, sq=rows, sk=keys, mask=mask, dim=dim, dim_v=dim, dtype=dtype)
        args = shaped(build(case, hopper), profile)
        check(args, run(args, flash_fwd_sm90.forward))


@pytest.mark.gpu
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("dim", "options"),
    [(dim, options) for dim in (128, 256) for options in ({"own": True}, {"cluster": BY_ROWS})]
    + [(dim, {"tall": tall}) for dim in (64, 128) for tall in (False, True)],
    ids=str,
)
def test_other_ways_to_share_keys_out(dim: int, options: dict[str, object], profile: str, hopper: torch.device) -> None:
    args = shaped(build(replace(CASE, sq=600, dim=dim, dim_v=dim, num_splits=1), hopper), profile)
    check(args, run(args, partial(flash_fwd_sm90.forward, **options)))
