"""What flash_merge is told of softmax states: every row of every layout at the address where torch has it."""

from itertools import product

import pytest
import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.kernels.flash_merge import StateSet, one_state, state_set

STATES, BATCH, SEQLEN, HEADS, DIM = 3, 2, 5, 4, 16


def outs(layout: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`[states, batch, seqlen, heads, dim]`, or rows in place of batch and seqlen."""
    match layout:
        case "dense":
            return torch.zeros(STATES, BATCH, SEQLEN, HEADS, DIM, dtype=dtype)
        case "heads first":
            return torch.zeros(STATES, BATCH, HEADS, SEQLEN, DIM, dtype=dtype).transpose(2, 3)
        case "rows":
            return torch.zeros(STATES, BATCH * SEQLEN, HEADS, DIM, dtype=dtype)
        case _:
            return torch.zeros(STATES, BATCH * SEQLEN, HEADS, 2 * DIM, dtype=dtype)[..., DIM:]


def lses(layout: str) -> Tensor:
    """`[states, batch, heads, seqlen]` or `[states, heads, rows]`."""
    match layout:
        case "dense":
            return torch.zeros(STATES, BATCH, HEADS, SEQLEN)
        case "rows":
            return torch.zeros(STATES, HEADS, BATCH * SEQLEN)
        case _:
            return torch.zeros(STATES, BATCH * SEQLEN, HEADS).transpose(1, 2)


def addresses(p: StateSet, state: int, row: int, head: int) -> tuple[int, int]:
    """Of an output row and its log-sum-exp, as flash_merge.cuh finds them."""
    batch, i = divmod(row, p.seqlen)
    out = state * p.out_state + batch * p.out_batch + i * p.out_row + head * p.out_head
    lse = state * p.lse_state + batch * p.lse_batch + i * p.lse_row + head * p.lse_head
    return p.out + (4 if p.in_float else 2) * out, p.lse + 4 * lse


def expected(out: Tensor, lse: Tensor, row: int, head: int) -> tuple[int, int]:
    batch, i = divmod(row, SEQLEN)
    at = out[batch, i, head] if out.dim() == 4 else out[row, head]
    lse_at = lse[batch, head, i] if lse.dim() == 3 else lse[head, row]
    return at.data_ptr(), lse_at.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("out_layout", "lse_layout"),
    [("heads first", "dense"), *product(("dense", "rows", "half of wider rows"), ("dense", "rows", "heads last"))],
)
def test_every_row_of_a_state_is_found(out_layout: str, lse_layout: str, dtype: torch.dtype) -> None:
    out, lse = outs(out_layout, dtype), lses(lse_layout)
    together = state_set(out, lse)

    assert together.count == STATES
    for state in range(STATES):
        alone = one_state(out[state], lse[state])
        assert alone.count == 1
        for row, head in product(range(BATCH * SEQLEN), range(HEADS)):
            want = expected(out[state], lse[state], row, head)
            assert addresses(together, state, row, head) == want
            assert addresses(alone, 0, row, head) == want


def test_rows_without_one_stride_are_refused() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        state_set(outs("heads first"), lses("rows"))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(7, HEADS, 20, dtype=torch.float16), "merged 16 bytes at a time"),
        (torch.zeros(7, HEADS, 264, dtype=torch.float16), "up to 256"),
        (torch.zeros(7, HEADS, DIM, dtype=torch.float64), "not in torch.float64"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(out: Tensor, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        one_state(out, torch.zeros(HEADS, 7))
