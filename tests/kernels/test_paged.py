"""Attention through block tables: page sizes, shuffled pages, chunked prefill on a cached prefix, both page layouts.

Also bitwise on a GPU: pages in another order, or another layout of the pool, must not change a bit of the result.
"""

from dataclasses import replace

import pytest
import torch

from attention_backend.problem import AttentionArgs

from .error_rule import check, run
from .problems import Case, block_table, build, generator, pool, randn

CPU = torch.device("cpu")
PAGE_SIZES = (16, 64, 128, 256, 1, 4, 48)
#: (new tokens, cached prefix): first chunks, later chunks, a chunk on a long prefix, chunks that straddle pages.
CHUNKS = ((64, 0), (63, 64), (128, 192), (100, 1000), (512, 3584), (257, 77))


def chunked_prefill(
    chunks: list[tuple[int, int]], page: int, device: torch.device, *, hnd: bool, dtype: torch.dtype = torch.bfloat16
) -> AttentionArgs:
    """A flattened batch of (new tokens, cached prefix) as the engine sends it: causal, 8 heads over 2, head_dim 64."""
    g, host = generator((chunks, page, hnd), device), generator((chunks, page), CPU)
    new, lens = [n for n, _ in chunks], [n + prefix for n, prefix in chunks]
    num_blocks = sum(-(-n // page) for n in lens) + 2
    k, v = (pool(num_blocks, page, 2, 64, dtype, g, hnd=hnd) for _ in range(2))
    return AttentionArgs(
        randn((sum(new), 8, 64), dtype, g),
        k,
        v,
        0.125,
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).to(device=device, dtype=torch.int32),
        max_seqlen_q=max(new),
        max_seqlen_k=max(lens),
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=block_table(lens, page, num_blocks, host).to(device),
        window_right=0,
    )


def check_page_order(args: AttentionArgs, device: torch.device) -> None:
    """The same keys in other blocks of the pool, and in the other memory layout: the same bits, on a GPU."""
    assert args.block_table is not None
    order = torch.randperm(args.k.shape[0], generator=generator("order", CPU)).to(device)
    moved = torch.empty_like(order)
    moved[order] = torch.arange(order.shape[0], device=device)
    table = torch.where(args.block_table >= 0, moved[args.block_table.clamp_min(0).long()].int(), -1).to(torch.int32)
    want, want_lse = run(args)
    shuffled = replace(args, k=args.k[order], v=args.v[order], block_table=table)
    other_layout = replace(args, k=args.k.contiguous(), v=args.v.contiguous())
    for variation in (shuffled, other_layout):
        out, lse = run(variation)
        if device.type == "cuda":
            assert torch.equal(out, want)
            assert torch.equal(lse, want_lse)
        else:  # a CPU's matrix library may sum in another order for other strides
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("hnd", [True, False], ids=["hnd", "nhd"])
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda c: f"{c[0]}new{c[1]}cached")
def test_chunked_prefill_meets_the_error_rule(
    chunk: tuple[int, int], page: int, hnd: bool, device: torch.device
) -> None:
    check(chunked_prefill([chunk], page, device, hnd=hnd))


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_a_mixed_batch_meets_the_error_rule(page: int, device: torch.device) -> None:
    check(chunked_prefill([(1, 700), (1, 0), (300, 0), (0, 50), (37, 411), (128, 128)], page, device, hnd=True))


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_page_order_and_layout_change_no_bit(page: int, device: torch.device) -> None:
    check_page_order(chunked_prefill([(128, 300), (65, 0)], page, device, hnd=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "window", "sliding", "chunk"])
@pytest.mark.parametrize("layout", ["paged", "paged_varlen"])
@pytest.mark.parametrize("page", [16, 64, 48])
def test_masks_through_pages_meet_the_error_rule(mask: str, layout: str, page: int, device: torch.device) -> None:
    check(build(Case(130, 700, batch=4, layout=layout, mask=mask, page=page), device))


@pytest.mark.gpu
def test_an_upper_bound_as_max_seqlen_changes_no_bit(device: torch.device) -> None:
    # The bound decides, where nobody else does, into how many parts keys are split.
    args = replace(chunked_prefill([(128, 300), (65, 0)], 64, device, hnd=True), num_splits=1)
    generous = replace(args, max_seqlen_q=1000, max_seqlen_k=10_000)
    assert torch.equal(run(args)[0], run(generous)[0])


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_small_pages_meet_the_error_rule_on_cpu(page: int) -> None:
    check(chunked_prefill([(1, 20), (0, 3), (9, 0), (7, 33)], page, CPU, hnd=page % 3 == 1))


def test_page_order_and_layout_change_nothing_on_cpu() -> None:
    check_page_order(chunked_prefill([(9, 30), (5, 0)], 16, CPU, hnd=True), CPU)
