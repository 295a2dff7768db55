"""Tensors past 2^31 elements: wide row strides, a large pool of pages, an output that large. Needs about 20 GB.

A 32-bit product of row and stride wraps here, reads elsewhere, and would be caught by the values.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend import block_patterns, block_sparse_attention
from attention_backend.fp8 import flash_attn_fp8_func
from attention_backend.problem import AttentionArgs

from .error_rule import check, kernels_for
from .prefix_problems import build, one_prefix
from .prefix_problems import check as check_prefix
from .problems import generator, randn

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LIMIT = 2**31


@pytest.fixture(autouse=True)
def room(cuda: torch.device) -> Iterator[None]:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(cuda)[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> AttentionArgs:
    return AttentionArgs(
        q,
        k,
        v,
        q.shape[-1] ** -0.5,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        window_right=0,
    )


def test_row_strides_may_lead_past_two_to_the_31(cuda: torch.device) -> None:
    g = generator("strides", cuda)
    rows, heads, kv_heads, dim, stride = 4096, 4, 2, 64, 1 << 20
    memory = torch.empty((rows, stride), dtype=BF16, device=cuda)
    assert memory.numel() > LIMIT
    at = 0
    views = []
    for count in (heads, kv_heads, kv_heads):
        view = memory[:, at : at + count * dim].view(rows, count, dim)
        view.copy_(randn((rows, count, dim), BF16, g))
        views.append(view)
        at += count * dim
    cu = torch.tensor([0, 1500, rows], dtype=torch.int32, device=cuda)
    q, k, v = views
    check(varlen(q, k, v, cu, 2596))


def test_batch_strides_may_lead_past_two_to_the_31(cuda: torch.device) -> None:
    g = generator("batch strides", cuda)
    seqlen, heads, dim = 300, 4, 128
    memory = torch.empty((3, LIMIT // 2 + 4096), dtype=BF16, device=cuda)
    q, k, v = (
        memory[:, i * seqlen * heads * dim :][:, : seqlen * heads * dim].unflatten(1, (seqlen, heads, dim))
        for i in range(3)
    )
    for view in (q, k, v):
        view.copy_(randn((3, seqlen, heads, dim), BF16, g))
    check(AttentionArgs(q, k, v, dim**-0.5, window_right=0))


@pytest.mark.parametrize("rows", [1, 200], ids=["decode", "prefill"])
def test_the_pool_may_be_larger_than_two_to_the_31(rows: int, cuda: torch.device) -> None:
    g = generator(("pool", rows), cuda)
    page, kv_heads, dim, lens = 64, 8, 128, [1000, 333]
    num_blocks = LIMIT // (page * kv_heads * dim) + 64
    k, v = (torch.empty((num_blocks, kv_heads, page, dim), dtype=BF16, device=cuda) for _ in range(2))
    table = torch.zeros((2, 16), dtype=torch.int32, device=cuda)
    table[0], table[1, :6] = torch.arange(16) + num_blocks - 20, torch.arange(6) + 7
    blocks = table.flatten().long()
    for cache in (k, v):
        cache[blocks] = randn((len(blocks), kv_heads, page, dim), BF16, g)
    args = AttentionArgs(
        randn((2, rows, 32, dim), BF16, g),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dim**-0.5,
        block_table=table,
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=cuda),
        max_seqlen_k=1024,
        window_right=0,
    )
    check(args)


def test_a_slot_past_two_to_the_31_elements_is_written(cuda: torch.device) -> None:
    from attention_backend.kernels import kv_cache_store

    g = generator("store", cuda)
    page, kv_heads, dim = 64, 8, 128
    num_blocks = LIMIT // (page * kv_heads * dim) + 8
    k_cache, v_cache = (torch.zeros((num_blocks, kv_heads, page, dim), dtype=BF16, device=cuda) for _ in range(2))
    k, v = randn((5, kv_heads, dim), BF16, g), randn((5, kv_heads, dim), BF16, g)
    last = num_blocks * page
    slots = torch.tensor([last - 1, last - 65, 3, last - 130, 64], dtype=torch.int64, device=cuda)
    kv_cache_store.store(k, v, k_cache, v_cache, slots)
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[slots // page, :, slots % page], new)
        cache[slots // page, :, slots % page] = 0
        assert not cache.any(), "a slot that nobody asked for was written"


def test_queries_and_output_may_be_larger_than_two_to_the_31(cuda: torch.device) -> None:
    """The last rows of a long sequence, checked against the same rows alone."""
    g = generator("output", cuda)
    heads, dim, window = 32, 128, 100
    total = LIMIT // (heads * dim) + 1000
    q = torch.empty((total, heads, dim), dtype=BF16, device=cuda).normal_(generator=g)
    k, v = (randn((total, 1, dim), BF16, g) for _ in range(2))

    def problem(first: int) -> AttentionArgs:
        n = total - first
        cu = torch.tensor([0, n], dtype=torch.int32, device=cuda)
        return replace(varlen(q[first:], k[first:], v[first:], cu, n), window_left=window)

    whole, tail = problem(0), problem(total - 600)
    rows = slice(-400, None)  # beyond the window of where the tail starts
    for kernel in kernels_for(whole).values():
        alone, alone_lse = kernel(tail)
        check(tail, (alone, alone_lse))
        out, lse = kernel(whole)
        torch.testing.assert_close(out[rows], alone[rows], atol=2e-3, rtol=1e-2)
        torch.testing.assert_close(lse[:, rows], alone_lse[:, rows], atol=1e-4, rtol=1e-5)
        assert bool(out.isfinite().all())
        del out


def test_rows_of_a_block_sparse_mask_may_lie_past_two_to_the_31(hopper: torch.device) -> None:
    """The last query head of all rows, against the same head alone, whose tensors are small enough."""
    g = generator("sparse rows", hopper)
    heads, dim = 16, 128
    rows = LIMIT // (heads * dim) + 300
    q = torch.empty((1, rows, heads, dim), dtype=BF16, device=hopper).normal_(generator=g)
    k, v = (randn((1, rows, 1, dim), BF16, g) for _ in range(2))
    window = block_patterns.sliding_window(rows, window=(100, 0), device=hopper)
    out = block_sparse_attention(q, k, v, window)
    alone = block_sparse_attention(q[:, :, -1:].contiguous(), k, v, window)
    assert isinstance(out, Tensor)
    assert isinstance(alone, Tensor)
    assert torch.equal(out[:, :, -1:], alone)
    assert bool(out[0, -1000:].isfinite().all())


def test_keys_of_a_block_sparse_mask_may_lie_past_two_to_the_31(hopper: torch.device) -> None:
    g = generator("sparse keys", hopper)
    heads, dim, rows = 16, 128, 300
    keys = LIMIT // (heads * dim) + 300
    q = randn((1, rows, heads, dim), BF16, g)
    k, v = (torch.empty((1, keys, heads, dim), dtype=BF16, device=hopper).normal_(generator=g) for _ in range(2))
    window = block_patterns.sliding_window(rows, keys, window=(1000, 0), device=hopper)
    out = block_sparse_attention(q, k, v, window)
    near = slice(keys - 1536 - keys % 128, keys)  # whole blocks of 128 keys, and all that any row sees
    few = block_patterns.sliding_window(rows, near.stop - near.start, window=(1000, 0), device=hopper)
    alone = block_sparse_attention(q, k[:, near].contiguous(), v[:, near].contiguous(), few)
    assert isinstance(out, Tensor)
    assert isinstance(alone, Tensor)
    assert torch.equal(out, alone)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(("rows", "keys"), [(LIMIT // 2048 + 300, 500), (200, LIMIT // 2048 + 300)], ids=["q", "kv"])
def test_tensors_of_the_fp8_forward_may_be_larger_than_two_to_the_31(
    rows: int, keys: int, hopper: torch.device
) -> None:
    """The last head, whose values are quantised by themselves, against the same head alone. Its keys may be cut into
    other parts there, whose probabilities are rounded otherwise: a few percent of a sum that is near zero."""
    g = generator(("fp8", rows), hopper)
    q, k, v = (torch.empty((1, n, 16, 128), dtype=BF16, device=hopper).normal_(generator=g) for n in (rows, keys, keys))
    out = flash_attn_fp8_func(q, k, v)
    alone = flash_attn_fp8_func(*(x[:, :, -1:].contiguous() for x in (q, k, v)))
    assert isinstance(out, Tensor)
    assert isinstance(alone, Tensor)
    assert float((out[:, :, -1:].float() - alone.float()).norm() / alone.float().norm()) < 0.1
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("requests", [3, 40], ids=["decode", "tensor_cores"])
def test_shared_pages_may_lie_past_two_to_the_31(requests: int, cuda: torch.device) -> None:
    """The same pages at the end of a large pool, whose other slots are NaN."""
    small = build(one_prefix(5000, tuple(37 * r % 500 for r in range(requests)), kv_heads=8), cuda)
    blocks, page, kv_heads, dim = small.k.shape
    num_blocks = LIMIT // (page * kv_heads * dim) + blocks
    first = num_blocks - blocks
    caches = []
    for x in (small.k, small.v):
        cache = torch.full((num_blocks, kv_heads, page, dim), torch.nan, dtype=x.dtype, device=cuda).transpose(1, 2)
        cache[first:] = x
        caches.append(cache)
    prefixes = [replace(level, block_table=level.block_table + first) for level in small.prefixes]
    large = replace(small, k=caches[0], v=caches[1], prefixes=prefixes, suffix=small.suffix + first)
    for ours, theirs in zip(large.attend(), small.attend(), strict=True):
        assert torch.equal(ours, theirs)
    check_prefix(small)
