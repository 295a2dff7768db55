"""flash_attn_with_kvcache checks a whole call before it writes: a refused one leaves the caches as they were."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import AttentionArgs, UnsupportedError, flash_attn_with_kvcache
from attention_backend.cache_store import Caches, store_new
from attention_backend.reference import standard

BATCH, SLOTS, HEADS, DIM = 2, 8, 2, 16


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call() -> dict[str, Any]:
    """One new key for each of two sequences."""
    new = {name: randn(BATCH, 1, HEADS, DIM) for name in "qkv"}
    caches = {name: randn(BATCH, SLOTS, HEADS, DIM) for name in ("k_cache", "v_cache")}
    return {**new, **caches, "cache_seqlens": i32(3, 5), "causal": True}


def tables(rows: int) -> dict[str, Tensor]:
    angles = torch.arange(rows)[:, None] / torch.tensor([1.0, 10.0])
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


PAGES = {name: randn(4, 4, HEADS, DIM) for name in ("k_cache", "v_cache")}
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "more keys": ({"k": randn(BATCH, 2, HEADS, DIM)}, ValueError, "k has 2 new rows a sequence, v 1"),
    "more values": ({"v": randn(BATCH, 4, HEADS, DIM)}, ValueError, "k has 1 new rows a sequence, v 4"),
    "fewer rows in the caches": (
        {**{n: randn(4, 1, HEADS, DIM) for n in "qkv"}, "cache_seqlens": i32(0, 0, 0, 0)},
        ValueError,
        "q has a batch of 4, k_cache and v_cache have 2 rows",
    ),
    "shorter values": ({"v_cache": randn(BATCH, 4, HEADS, DIM)}, ValueError, "alike but for dim"),
    "queries of three dimensions": ({"q": randn(BATCH, HEADS, DIM)}, ValueError, "q must be .batch, seqlen_q"),
    "queries of another head_dim": ({"q": randn(BATCH, 1, HEADS, 32)}, ValueError, "same head_dim, got 32 and 16"),
    "queries of odd heads": ({"q": randn(BATCH, 1, 3, DIM)}, ValueError, "multiple of num_kv_heads, got 3 and 2"),
    "window": ({"window_size": (-5, 0)}, ValueError, "window_left must be -1"),
    "softcap": ({"softcap": float("nan")}, ValueError, "softcap must be 0, or from .* got nan"),
    "sinks": ({"sinks": randn(3)}, ValueError, r"sinks must have shape \[2\]"),
    "leftpad": ({"cache_leftpad": torch.zeros(2).long()}, TypeError, "cache_leftpad must be torch.int32"),
    "scales without float8": ({"k_scale": torch.ones(2)}, ValueError, "k_scale goes with"),
    "wide table": (
        {**PAGES, "block_table": torch.zeros(2, 2).long()}, TypeError, "block_table must be torch.int32"
    ),
    "pages of nothing": (
        {**{name: randn(4, 0, HEADS, DIM) for name in PAGES}, "block_table": torch.zeros(2, 2).int()},
        ValueError,
        r"block_table needs pages of a token at least, got caches \(4, 0, 2, 16\)",
    ),
    "tall table": (
        {**PAGES, "block_table": torch.zeros(3, 2).int()}, ValueError, r"block_table must have shape \[2, any\]"
    ),
    "negative length": ({"cache_seqlens": -3}, ValueError, "cache_seqlens must be from 0 to 8.*got -3"),
    "long length": ({"cache_seqlens": 100}, ValueError, "cache_seqlens must be from 0 to 8.*got 100"),
    "full": ({"cache_seqlens": 8}, ValueError, "holds 8 keys a sequence, the new ones would end at 9"),
    "one full": ({"cache_seqlens": i32(0, 8)}, ValueError, "holds 8 keys a sequence, the new ones would end at 9"),
    "one negative": ({"cache_seqlens": i32(0, -1)}, ValueError, "cache_seqlens must be at least 0, got -1"),
    "short tables": (tables(7), ValueError, "rotary_cos and rotary_sin have 7 rows, the cache has 8 positions"),
    "tables short of queries": (
        {**tables(9), "q": randn(BATCH, 3, HEADS, DIM)}, ValueError, "have 9 rows, the cache has 10 positions"
    ),
    "tables short of pages": (
        {**tables(7), **PAGES, "block_table": torch.zeros(2, 2).int()}, ValueError, "the cache has 8 positions"
    ),
    "keys with gradients": ({"k": randn(BATCH, 1, HEADS, DIM).requires_grad_()}, UnsupportedError, "no gradient"),
    "turned queries with gradients": (
        {**tables(8), "q": randn(BATCH, 1, HEADS, DIM).requires_grad_()},
        UnsupportedError,
        "rotary of queries has no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_refused_call_changes_nothing(name: str) -> None:
    changes, error, message = BAD_CALLS[name]
    arguments = {**call(), **changes}
    before = [arguments[cache].clone() for cache in ("k_cache", "v_cache")]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before[0])
    assert torch.equal(arguments["v_cache"], before[1])


def test_a_length_without_new_keys_is_within_the_cache() -> None:
    arguments = {**call(), "k": None, "v": None}
    for length in (-1, 9):
        with pytest.raises(ValueError, match=f"from 0 to 8, what the cache holds, got {length}"):
            flash_attn_with_kvcache(**{**arguments, "cache_seqlens": length})
    assert torch.equal(
        torch.as_tensor(flash_attn_with_kvcache(**{**arguments, "cache_seqlens": 8})),
        torch.as_tensor(flash_attn_with_kvcache(**{**arguments, "cache_seqlens": None})),
    )


def test_a_cache_may_have_more_rows_than_there_are_queries() -> None:
    arguments = call()
    large = {name: torch.cat([arguments[name], randn(3, SLOTS, HEADS, DIM)]) for name in ("k_cache", "v_cache")}
    out = torch.as_tensor(flash_attn_with_kvcache(**{**arguments, **large}))
    assert torch.equal(out, torch.as_tensor(flash_attn_with_kvcache(**arguments)))
    for name, cache in large.items():
        assert torch.equal(cache[:BATCH], arguments[name])
        assert torch.equal(cache[BATCH:], randn(3, SLOTS, HEADS, DIM))


def test_what_a_traced_call_places_outside_of_the_cache_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as on a GPU, where lengths are not looked at
    arguments = call()
    k, v = (randn(BATCH, 3, HEADS, DIM) for _ in "kv")
    caches = Caches(arguments["k_cache"], arguments["v_cache"], None, None)
    want = caches.k.clone()
    store_new(arguments["q"], k, v, caches, i32(-2, 7), None, None)
    want[0, 0], want[1, 7] = k[0, 2], k[1, 0]
    assert torch.equal(caches.k, want)


def test_queries_have_their_gradient() -> None:
    arguments = call()
    q = arguments["q"].requires_grad_()
    (ours,) = torch.autograd.grad(torch.as_tensor(flash_attn_with_kvcache(**arguments)).sum(), q)
    caches = arguments["k_cache"], arguments["v_cache"]
    truth = AttentionArgs(q, *caches, DIM**-0.5, seqused_k=arguments["cache_seqlens"] + 1, window_right=0)
    (want,) = torch.autograd.grad(standard.attention(truth)[0].sum(), q)
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)
