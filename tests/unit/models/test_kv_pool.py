"""How many blocks fit, and what they look like."""

import pytest
import torch

from models.attention_sites import AttentionSite
from models.kv_pool import (
    FP8,
    KVCacheDtypeError,
    MemoryBudget,
    PoolTooSmallError,
    allocate,
    bytes_per_block,
    count_blocks,
    cuda_pool_bytes,
    fill,
    hold,
    holding,
    kv_cache_dtype,
)


def _site(layer_idx: int, num_kv_heads: int = 8, head_dim: int = 128, head_dim_v: int = 128) -> AttentionSite:
    return AttentionSite(
        layer_idx=layer_idx,
        layer_type="full_attention",
        num_heads=32,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=1.0,
        window=0,
        chunk_size=0,
        softcap=0.0,
        has_sinks=False,
    )


def test_a_block_of_llama_8b_takes_128_kib_a_token() -> None:
    sites = [_site(i) for i in range(32)]
    assert bytes_per_block(sites, 64, torch.bfloat16) == 64 * 128 * 1024


def test_layers_may_differ_in_heads_and_in_key_and_value_sizes() -> None:
    sites = [_site(0, num_kv_heads=2, head_dim=24, head_dim_v=16), _site(1, num_kv_heads=1, head_dim=8, head_dim_v=8)]
    assert bytes_per_block(sites, 16, torch.float32) == 16 * 4 * (2 * 40 + 16)
    caches = allocate(sites, 5, 16, torch.float32, torch.device("cpu"))
    assert [tuple(t.shape) for pair in caches for t in pair] == [
        (5, 2, 16, 24),
        (5, 2, 16, 16),
        (5, 1, 16, 8),
        (5, 1, 16, 8),
    ]
    assert sum(t.nbytes for pair in caches for t in pair) == 5 * bytes_per_block(sites, 16, torch.float32)


def test_float8_pages_take_half_and_carry_their_scales() -> None:
    sites = [_site(i) for i in range(32)]
    assert bytes_per_block(sites, 64, FP8) == 64 * 64 * 1024
    million = -(-1_000_000 // 64) + 1
    assert million * bytes_per_block(sites, 64, FP8) < 61.1 * 2**30  # beside 15 GiB of weights on one H200
    scales = [(torch.full((8,), float(i)), torch.ones(8)) for i in range(2)]
    caches = allocate(sites[:2], 3, 16, FP8, torch.device("cpu"), scales)
    assert caches[1].k.dtype == caches[1].v.dtype == FP8
    assert caches[1].k_scale is scales[1][0]
    for dtype, given in ((FP8, None), (torch.float32, scales)):
        with pytest.raises(ValueError, match="scales go with"):
            allocate(sites[:2], 3, 16, dtype, torch.device("cpu"), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_blocks_to_rehearse_with_hold_numbers_and_the_dummy_page_none(dtype: torch.dtype) -> None:
    scales = [(torch.ones(8), torch.ones(8))] * 2 if dtype == FP8 else None
    caches = allocate([_site(i) for i in range(2)], 6, 16, dtype, torch.device("cpu"), scales)
    fill(caches, 3)
    for tensor in (tensor.float() for pages in caches for tensor in pages):
        assert tensor.isfinite().all()
        assert 0.9 < tensor[1:4].std() < 1.1
        assert not tensor[0].any()
        assert not tensor[4:].any()


def test_the_caches_dtype_has_vllms_names() -> None:
    cpu, sites = torch.device("cpu"), [_site(0)]
    for name in ("auto", "bfloat16"):
        assert kv_cache_dtype(name, torch.bfloat16, sites, cpu) == torch.bfloat16
    for name in ("fp8", "fp8_e4m3"):
        assert kv_cache_dtype(name, torch.bfloat16, sites, cpu) == FP8
    for name in ("float16", "fp8_e5m2", "int8", ""):
        with pytest.raises(KVCacheDtypeError, match=r"with this model it is auto .*, bfloat16, fp8 or fp8_e4m3"):
            kv_cache_dtype(name, torch.bfloat16, sites, cpu)


def test_the_pool_takes_what_the_step_leaves_of_its_share_of_the_gpu() -> None:
    gib = 2**30
    assert cuda_pool_bytes(MemoryBudget(gpu_memory_utilization=0.5), total=100 * gib, peak=20 * gib) == 30 * gib
    assert cuda_pool_bytes(MemoryBudget(gpu_memory_utilization=0.5), total=100 * gib, peak=60 * gib) == 0
    assert cuda_pool_bytes(MemoryBudget(kv_cache_memory_bytes=7), total=100 * gib, peak=20 * gib) == 7


def test_blocks_that_no_sequence_could_use_are_not_allocated() -> None:
    limits = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 100}
    assert count_blocks(10**12, 1000, **limits) == 4 * 7 + 1
    assert count_blocks(20_999, 1000, **limits) == 20


def test_a_pool_that_holds_one_full_sequence_and_the_dummy_page_is_enough() -> None:
    assert count_blocks(8000, 1000, block_size=16, max_num_seqs=4, max_model_len=100) == 8


def test_a_pool_too_small_for_one_sequence_is_refused_with_what_would_fit() -> None:
    with pytest.raises(PoolTooSmallError, match=r"room for 96 tokens .* less than max_model_len = 100"):
        count_blocks(7999, 1000, block_size=16, max_num_seqs=4, max_model_len=100)


@pytest.mark.gpu
def test_memory_that_is_held_is_held_again_after_the_cache_was_emptied() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    hold(2**28, device)
    held = torch.cuda.memory_reserved(device)
    with holding(device):
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(device) <= held - 2**28
    assert torch.cuda.memory_reserved(device) == held
    torch.cuda.empty_cache()
