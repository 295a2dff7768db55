"""Attention over KV caches: FlashAttention's flash_attn_with_kvcache, and the engine's paged_attention.

Both write new keys and values first, then attend. Knows no scheduler and waits for no CUDA device.
"""

import torch
from torch import Tensor

from attention_backend import paged_ops
from attention_backend.cache_store import Caches, Rotary, cache_lengths, store_new
from attention_backend.checks import FP8, check_tensor, check_window
from attention_backend.interface import Window, attention_with_lse, default_scale, is_local, window_right
from attention_backend.metadata import PagedMetadata
from attention_backend.paged_cascade import Layer, paged_cascade
from attention_backend.problem import UNBOUNDED, AttentionArgs


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: PagedMetadata,
    *,
    softmax_scale: float,
    window_left: int = UNBOUNDED,
    chunk_size: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Stores this step's keys and values in their pages, then causal attention of every row through the block table.

    q `[T, Hq, D]`, k_new `[T, Hkv, D]`, v_new `[T, Hkv, Dv]`; caches `[num_blocks, Hkv, block_size, D or Dv]`, changed
    in place. Without k_new and v_new they are in their pages already (`layers.rotary_store`). Pages that the step's
    sequences share are read once for all of them, but by layers with windows or chunks, whose rows see different keys.
    Float8_e4m3fn caches come with scales, float32 `[Hkv]`: see flash_attn_with_kvcache.
    Returns `[T, Hq, Dv]`. Not differentiable.
    """
    _check_paged(q, k_new, v_new, k_cache, v_cache, metadata)
    _check_cache_dtypes(q, k_cache, v_cache, k_scale, v_scale)
    check_window("window_left", window_left)
    shared = metadata.shared_decodes is not None or metadata.shared_prefills is not None
    if shared and window_left == UNBOUNDED and chunk_size == 0:
        if k_new is not None and v_new is not None:
            paged_ops.store_kv_op(k_new, v_new, k_cache, v_cache, metadata.slot_mapping, k_scale, v_scale)
        return paged_cascade(q, Layer(k_cache, v_cache, k_scale, v_scale, softmax_scale, softcap, sinks), metadata)
    return paged_ops.paged_attention_op(
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_table,
        metadata.slot_mapping,
        metadata.num_decodes,
        metadata.max_seqlen_q,
        metadata.max_seqlen_k,
        softmax_scale,
        window_left,
        chunk_size,
        softcap,
        sinks,
        k_scale,
        v_scale,
        metadata.decodes_here,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    chunk_size: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """q `[batch, seqlen_q, num_heads, head_dim]` against a cache, which first gets k and v `[batch, seqlen_new, ...]`.

    The cache is `[batch_cache, seqlen_cache, num_kv_heads, *]`, or with `block_table` pages
    `[num_blocks, page_size, num_kv_heads, *]` (any strides: the engine's pool fits as a transposed view).
    `cache_seqlens` counts the keys before the new ones. Rotary turns k and q: new key i by `cache_seqlens + i`, and
    query i too if attention is causal or local, else every query by `cache_seqlens`.

    A float8_e4m3fn cache comes with float32 `[num_kv_heads]` scales: its keys stand for `k_cache * k_scale[head]`, its
    values likewise. New keys and values are of q's dtype; divided by the scales they are rounded into the cache.
    """
    lengths = cache_lengths(q, k_cache, k, v, cache_seqlens, block_table)
    rotary = Rotary.of(q, k, rotary_cos, rotary_sin, rotary_interleaved, follow=is_local(causal, window_size))
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx picks rows of a dense cache; with block_table reorder the table instead")
    if cache_batch_idx is not None:
        # A dense cache is a paged one whose pages are whole rows.
        check_tensor("cache_batch_idx", cache_batch_idx, torch.int32, (q.shape[0],), q.device)
        block_table = cache_batch_idx.unsqueeze(1)
    used = lengths
    if k is not None and v is not None:
        caches = Caches(k_cache, v_cache, k_scale, v_scale)
        q = store_new(q, k, v, caches, lengths, block_table, rotary)
        used = lengths + k.shape[1]
    out, lse = attention_with_lse(
        AttentionArgs(
            q,
            k_cache,
            v_cache,
            default_scale(softmax_scale, q),
            max_seqlen_k=0 if block_table is None else block_table.shape[1] * k_cache.shape[1],
            seqused_k=used,
            leftpad_k=cache_leftpad,
            block_table=block_table,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            window_left=window_size[0],
            window_right=window_right(causal, window_size),
            chunk_size=chunk_size,
            softcap=softcap,
            num_splits=num_splits,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    )
    return (out, lse) if return_softmax_lse else out


def _check_paged(
    q: Tensor, k_new: Tensor | None, v_new: Tensor | None, k_cache: Tensor, v_cache: Tensor, metadata: PagedMetadata
) -> None:
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new go together")
    for name, rows in (("q", q), ("k_new", k_new), ("v_new", v_new)):
        if rows is not None and rows.dim() != 3:
            raise ValueError(f"{name} must be [tokens, heads, dim], got {tuple(rows.shape)}")
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must be [num_blocks, num_kv_heads, block_size, dim], "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    for name, rows, cache in (("keys", k_new, k_cache), ("values", v_new, v_cache)):
        if rows is not None and rows.shape != (q.shape[0], cache.shape[1], cache.shape[3]):
            raise ValueError(
                f"new {name} {tuple(rows.shape)} of {q.shape[0]} queries do not fit caches {tuple(cache.shape)}"
            )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(k_cache.shape)}: head_dim, or head ratio")
    if metadata.block_table.dtype != torch.int32 or metadata.slot_mapping.dtype != torch.int64:
        raise TypeError(
            f"block_table must be int32 and slot_mapping int64, got {metadata.block_table.dtype} and "
            f"{metadata.slot_mapping.dtype}"
        )
    for name in ("cu_seqlens_q", "seq_lens", "slot_mapping"):
        if not getattr(metadata, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if metadata.slot_mapping.shape[0] != q.shape[0]:
        raise ValueError(f"slot_mapping has {metadata.slot_mapping.shape[0]} slots for {q.shape[0]} new keys")


def _check_cache_dtypes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    scaled = k_cache.dtype == v_cache.dtype == FP8
    if not scaled and not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != scaled:
            raise ValueError(f"{name} goes with {FP8} caches, and they with it: they are {k_cache.dtype}")
        if scale is not None:
            check_tensor(name, scale, torch.float32, (k_cache.shape[1],), q.device)
