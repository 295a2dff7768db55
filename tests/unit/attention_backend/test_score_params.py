"""What kernels are told of the softcap: factors that are numbers whatever it is, so that no score becomes NaN."""

import ctypes
import math

import pytest
import torch

from attention_backend.kernels.params import score_params
from attention_backend.problem import AttentionArgs


def args_of(softcap: float, scale: float = 0.125) -> AttentionArgs:
    x = torch.zeros(1, 4, 2, 64)
    return AttentionArgs(x, x, x, scale, softcap=softcap)


def test_a_capped_score_is_softcap_times_tanh() -> None:
    p = score_params(args_of(30.0))
    for product in (-900.0, -3.0, 0.0, 0.25, 400.0):
        capped = p.softcap - 2 * p.softcap / (1 + 2 ** (product * p.cap_log2))  # parts/score.cuh
        assert capped == pytest.approx(30 * math.tanh(product * 0.125 / 30), abs=1e-5)
    assert p.per_softcap == pytest.approx(1 / 30)


@pytest.mark.parametrize("softcap", [1e-45, 1e-38, 1e30, 1.7e38])
def test_factors_are_finite(softcap: float) -> None:
    p = score_params(args_of(softcap))
    twice, in_log2 = (ctypes.c_float(x * p.softcap).value for x in (2, math.log2(math.e)))  # in parts/score.cuh
    assert all(math.isfinite(x) for x in (twice, in_log2, p.cap_log2, p.per_softcap))
    assert 0 < p.per_softcap <= ctypes.c_float(torch.finfo(torch.float32).max).value


def test_without_a_softcap_there_are_none() -> None:
    p = score_params(args_of(0.0))
    assert (p.softcap, p.cap_log2, p.per_softcap) == (0, 0, 0)
