"""Which decode kernel is preferred: a matter of shapes and upper bounds, so meta tensors are enough to ask."""

import pytest
import torch

from attention_backend.heuristics.decode import HOPPER_DECODE_MOST_BYTES, prefers_hopper_decode
from attention_backend.kernels.flash_decode import prefers_hopper
from attention_backend.problem import AttentionArgs

META = torch.device("meta")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def paged(batch: int, longest: int, dtype: torch.dtype = torch.bfloat16) -> AttentionArgs:
    """A step over a pool and a table that are larger than it needs."""
    pool = empty(1 << 20, PAGE, KV_HEADS, DIM, dtype=dtype)
    return AttentionArgs(
        empty(batch, 1, HEADS, DIM),
        pool,
        pool,
        1.0,
        max_seqlen_k=longest,
        seqused_k=empty(batch, dtype=torch.int32),
        block_table=empty(batch, 1 << 14, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("batch", "longest", "hopper"),
    [
        (1, 1024, True),
        (1, 8192, True),
        (1, 16_384, True),
        (1, 16_385, False),
        (16, 1024, True),
        (17, 1024, False),
        (64, 1024, False),
        (64, 4096, False),
        (1, 131_072, False),
        (1000, 131_072, False),
    ],
)
def test_few_bytes_of_keys_and_values_prefer_hopper_s_kernel(batch: int, longest: int, hopper: bool) -> None:
    assert prefers_hopper(paged(batch, longest)) is hopper


@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_float8_prefers_hopper_s_kernel_at_any_size(batch: int) -> None:
    assert prefers_hopper(paged(batch, 131_072, torch.float8_e4m3fn))


def test_dense_keys_count_as_many_as_they_are() -> None:
    for length, hopper in ((4096, True), (4097, False)):
        k = empty(4, length, KV_HEADS, DIM)
        assert prefers_hopper(AttentionArgs(empty(4, 1, HEADS, DIM), k, k, 1.0)) is hopper


def test_packed_keys_count_by_their_bound() -> None:
    cu = empty(5, dtype=torch.int32)
    k = empty(9000, KV_HEADS, DIM)
    for longest, hopper in ((4096, True), (4097, False)):
        args = AttentionArgs(
            empty(4, HEADS, DIM), k, k, 1.0, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=1, max_seqlen_k=longest
        )
        assert prefers_hopper(args) is hopper


def test_keys_and_values_of_different_widths_count_both() -> None:
    keys = HOPPER_DECODE_MOST_BYTES // (2 * (192 + 128))
    assert prefers_hopper_decode(keys, 1, 192 + 128, 2)
    assert not prefers_hopper_decode(keys + 1, 1, 192 + 128, 2)
