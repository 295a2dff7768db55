"""Memory of the CPU path is linear in length: 32k tokens, measured by the allocator."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu

LENGTH = 32_768
SQUARE = LENGTH * LENGTH * 4  # bytes of one head's scores, 4 GiB


def peak(args: AttentionArgs, grad: bool) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out, lse = cpu.forward(args)
        if grad:
            cpu.backward(args, out, lse, out)
    held = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    assert highest > 0
    return highest


def test_forward_and_backward_at_32k_hold_no_square() -> None:
    # A window keeps the work small; the tensors and the tiles are those of a full 32k problem.
    q, k, v = (torch.randn(1, LENGTH, 1, 16) for _ in range(3))
    args = AttentionArgs(q, k, v, 0.25, window_left=1000, window_right=0)
    assert peak(args, grad=True) < SQUARE // 64


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_last_rows_of_a_full_32k_problem_hold_no_square(dropout_p: float) -> None:
    k, v = (torch.randn(1, LENGTH, 2, 16) for _ in range(2))
    q, seed = torch.randn(1, 256, 4, 16), torch.tensor([1, 2])
    args = AttentionArgs(q, k, v, 0.25, window_right=0, dropout_p=dropout_p, dropout_seed=seed)
    assert peak(args, grad=True) < 256 * LENGTH * 4 * 4 // 2  # half of this problem's scores
