"""New keys and values of a call over a KV cache: where they go, how they are turned, and how float8 stores them.

Knows no attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend import paged_ops
from attention_backend.checks import FP8, check_device, check_int, check_is_tensor, check_tensor
from attention_backend.operators import readable


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values `[batch_cache or num_blocks, slots, num_kv_heads, *]`, with their scales if they are float8."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Rotary:
    """How new keys and their queries are turned: tables `[seqlen_ro, rotary_dim / 2]`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    follow: bool  # query i is turned by its own position, else all by the first new key's

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        interleaved: bool,
        *,
        follow: bool,
        capacity: int,
    ) -> "Rotary | None":
        """None without tables. Raises for tables that do not fit, or end before `capacity`, the cache's last key."""
        if (cos is None) != (sin is None):
            raise ValueError("rotary_cos and rotary_sin go together")
        if cos is None or sin is None:
            return None
        if k is None:
            raise ValueError("rotary_cos without k: rotary is applied to new keys and their queries only")
        _check_rotary(q, cos, sin)
        # Queries beyond the new keys, which follow them, may stand behind the cache's end.
        positions = capacity + (max(q.shape[1] - k.shape[1], 0) if follow else 0)
        if cos.shape[0] < positions:
            raise ValueError(f"rotary_cos and rotary_sin have {cos.shape[0]} rows, the cache has {positions} positions")
        return cls(cos, sin, interleaved, follow)


def store_new(
    q: Tensor, k: Tensor, v: Tensor, caches: Caches, lengths: Tensor, block_table: Tensor | None, rotary: Rotary | None
) -> Tensor:
    """Writes k and v `[batch, seqlen_new, num_kv_heads, *]`, which `check_new` has passed, behind the first `lengths`
    keys. Returns q, turned."""
    slots = _slots(lengths, k.shape[1], caches.k, block_table).flatten()
    rows = (k.flatten(0, 1), v.flatten(0, 1))
    k_cache, v_cache = caches.k.transpose(1, 2), caches.v.transpose(1, 2)
    scales = (caches.k_scale, caches.v_scale)
    if rotary is None:
        paged_ops.store_kv_op(*rows, k_cache, v_cache, slots, *scales)
        return q
    steps = torch.arange(max(q.shape[1], k.shape[1]), dtype=torch.int32, device=q.device)
    turning = steps[: q.shape[1]] if rotary.follow else torch.zeros_like(steps[: q.shape[1]])
    q_positions, k_positions = (lengths.unsqueeze(1) + s for s in (turning, steps[: k.shape[1]]))
    turned: Tensor = paged_ops.rotate_and_store_op(
        q.flatten(0, 1), *rows, k_cache, v_cache, slots, q_positions.flatten(), k_positions.flatten(), rotary.cos,
        rotary.sin, rotary.interleaved, *scales,
    )  # fmt: skip
    return turned.view(q.shape)


def check_caches(q: Tensor, caches: Caches, block_table: Tensor | None) -> int:
    """How many keys of a sequence the caches hold. Raises for caches that do not fit each other or q."""
    k, v = caches.k, caches.v
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q must be [batch, seqlen_q, heads, dim], k_cache and v_cache [batch_cache or num_blocks, slots, kv_heads, "
            f"dim], alike but for dim; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if block_table is not None:
        return block_table.shape[1] * k.shape[1]
    if k.shape[0] < q.shape[0]:
        raise ValueError(f"q has a batch of {q.shape[0]}, k_cache and v_cache have {k.shape[0]} rows")
    return k.shape[1]


def check_new(q: Tensor, k: Tensor, v: Tensor, caches: Caches) -> None:
    """Raises for new keys and values that do not fit each other, their queries or the caches."""
    for name, new, cache in (("k", k, caches.k), ("v", v, caches.v)):
        check_is_tensor(name, new)
        if new.dim() != 4 or new.shape[0] != q.shape[0] or new.shape[2] != cache.shape[2]:
            raise ValueError(
                f"{name} must be [{q.shape[0]}, seqlen_new, {cache.shape[2]}, dim], got {tuple(new.shape)}"
            )
        if new.shape[3] != cache.shape[3]:
            raise ValueError(f"{name} has head_dim {new.shape[3]}, its cache {cache.shape[3]}")
        if new.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {new.dtype}")
        check_device(name, new, q.device)
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} new rows a sequence, v {v.shape[1]}")
    if caches.k.dtype == caches.v.dtype == FP8:
        for name, scale in (("k_scale", caches.k_scale), ("v_scale", caches.v_scale)):
            if scale is None:
                raise ValueError(f"a {FP8} cache needs {name}: what its numbers are multiplied by")
    elif caches.k.dtype != k.dtype or caches.v.dtype != v.dtype:
        raise TypeError(f"k and v are {k.dtype}, the caches {caches.k.dtype} and {caches.v.dtype}")


def cache_lengths(q: Tensor, num_new: int, capacity: int, cache_seqlens: int | Tensor | None) -> Tensor:
    """int32 `[batch]`: keys in the cache before the new ones. Without `cache_seqlens`: all that it holds."""
    if isinstance(cache_seqlens, Tensor):
        check_tensor("cache_seqlens", cache_seqlens, torch.int32, (q.shape[0],), q.device)
        return cache_seqlens
    length = capacity if cache_seqlens is None else cache_seqlens
    check_int("cache_seqlens, where it is not a tensor,", length)
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens must be from 0 to {capacity}, what the cache holds, got {length}")
    if length + num_new > capacity:
        raise ValueError(f"the cache holds {capacity} keys a sequence, the new ones would end at {length + num_new}")
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _check_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_is_tensor("rotary_cos", cos)
    check_is_tensor("rotary_sin", sin)
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= q.shape[-1] or cos.shape[0] == 0:
        raise ValueError(
            f"rotary_cos and rotary_sin must both be [seqlen_ro, rotary_dim / 2] with rotary_dim <= {q.shape[-1]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, q.dtype, (None, None), q.device)


def _slots(lengths: Tensor, num_new: int, k_cache: Tensor, block_table: Tensor | None) -> Tensor:
    """int64 `[batch, num_new]`: the slots after the first `lengths`. Outside of the cache: -1 on CUDA, an error on the
    CPU, where looking costs nothing."""
    block_size = k_cache.shape[1]
    capacity = block_size * (1 if block_table is None else block_table.shape[1])
    positions = lengths.long().unsqueeze(1) + torch.arange(num_new, device=lengths.device)
    inside = (positions >= 0) & (positions < capacity)
    if readable(lengths) and not bool(inside.all()):
        if bool((positions < 0).any()):
            raise ValueError(f"cache_seqlens must be at least 0, got {lengths.min()}")
        raise ValueError(f"the cache holds {capacity} keys a sequence, the new ones would end at {positions.max() + 1}")
    positions = positions.clamp(0, max(capacity - 1, 0))
    if block_table is None:
        rows = torch.arange(lengths.shape[0], device=lengths.device).unsqueeze(1)
    else:
        rows = block_table.long().gather(1, positions // block_size)
    return torch.where(inside, rows * block_size + positions % block_size, -1)
