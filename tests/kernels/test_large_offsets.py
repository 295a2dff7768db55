"""Tensors past 2^31 elements: wide row strides, a large pool of pages, an output that large. Needs about 20 GB.

A 32-bit product of row and stride wraps here, reads elsewhere, and would be caught by the values.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs

from .error_rule import check, kernels_for
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
