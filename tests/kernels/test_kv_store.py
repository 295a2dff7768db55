"""Storing new keys and values into pages: every asked slot holds exactly its token, no other slot changes."""

import pytest
import torch
from torch import Tensor

from .problems import generator, randn

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """The implementation for the tensors' device."""
    if k.is_cuda:
        from attention_backend.kernels import kv_cache_store

        kv_cache_store.store(k, v, k_cache, v_cache, slots)
    else:
        from attention_backend.reference import kv_cache

        kv_cache.store(k, v, k_cache, v_cache, slots)


def check_store(
    tokens: int, page: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> None:
    g = generator(("store", tokens, page, dims, dtype, packed), device)
    host = generator(("slots", tokens, page), CPU)
    kv_heads, num_blocks = 3, -(-tokens // page) + 4
    caches = [torch.full((num_blocks, kv_heads, page, d), torch.nan, dtype=dtype, device=device) for d in dims]
    if packed:  # keys and values as views of one projection's output
        both = randn((tokens, kv_heads * sum(dims)), dtype, g)
        k, v = (x.unflatten(1, (kv_heads, -1)) for x in both.split([kv_heads * d for d in dims], dim=1))
    else:
        k, v = (randn((tokens, kv_heads, d), dtype, g) for d in dims)
    slots = torch.randperm(num_blocks * page, generator=host)[:tokens]
    skipped = torch.rand(tokens, generator=host) < 0.2
    slots = torch.where(skipped, -1 - torch.arange(tokens), slots).to(device)
    store(k, v, caches[0], caches[1], slots)
    kept = ~skipped.to(device)
    where = (slots[kept] // page, slots[kept] % page)
    for new, cache in zip((k, v), caches, strict=True):
        slotwise = cache.transpose(1, 2)  # [block, slot, head, dim]
        assert torch.equal(slotwise[where], new[kept])
        slotwise[where] = torch.nan
        assert bool(cache.isnan().all()), "a slot that no token asked for was written"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300, 4096])
@pytest.mark.parametrize("page", [16, 64, 128, 1, 48])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256)], ids=str)
def test_every_slot_holds_its_token(tokens: int, page: int, dims: tuple[int, int], device: torch.device) -> None:
    check_store(tokens, page, dims, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["own", "packed"])
def test_every_dtype_and_strided_tokens_are_stored(dtype: torch.dtype, packed: bool, device: torch.device) -> None:
    check_store(100, 64, (128, 128), dtype, device, packed=packed)


@pytest.mark.gpu
def test_no_tokens_store_nothing(device: torch.device) -> None:
    check_store(0, 64, (64, 64), torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["own", "packed"])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_every_slot_holds_its_token_on_cpu(tokens: int, packed: bool, dtype: torch.dtype) -> None:
    check_store(tokens, 16, (32, 24), dtype, CPU, packed=packed)
