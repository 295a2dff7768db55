"""Attention over KV caches: FlashAttention's flash_attn_with_kvcache, and the engine's paged_attention.

Both write new keys and values first, then attend. Knows no scheduler and waits for no CUDA device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention_backend import dispatch, paged_ops
from attention_backend.cache_store import Caches, Rotary, cache_lengths, check_caches, check_new, store_new
from attention_backend.checks import check_args, check_factors, check_is_tensor, check_tensor, check_window
from attention_backend.host_checks import check_cached
from attention_backend.interface import Window, checked_attention, default_scale, window_bounds
from attention_backend.metadata import PagedMetadata
from attention_backend.no_gradients import refuse_gradients, refuse_tangents
from attention_backend.operators import unseen
from attention_backend.page_checks import check_pages, check_step
from attention_backend.paged_cascade import Layer, paged_cascade
from attention_backend.problem import UNBOUNDED, AttentionArgs
from attention_backend.reference import decode


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
    Returns `[T, Hq, Dv]`. Raises ValueError and TypeError before anything is stored, and UnsupportedError where
    autograd asks for a gradient: there is none.
    """
    check_step(q, k_new, v_new, k_cache, v_cache, metadata, sinks)
    check_pages(q, k_cache, v_cache, k_scale, v_scale)
    check_window("window_left", window_left)
    check_factors(softmax_scale, softcap)
    refuse_gradients("paged_attention", q, k_new, v_new, k_cache, v_cache, sinks, k_scale, v_scale)
    shared = metadata.shared_decodes is not None or metadata.shared_prefills is not None
    if shared and window_left == UNBOUNDED and chunk_size == 0:
        if k_new is not None and v_new is not None:
            paged_ops.store_kv_op(k_new, v_new, k_cache, v_cache, metadata.slot_mapping, k_scale, v_scale)
        return paged_cascade(q, Layer(k_cache, v_cache, k_scale, v_scale, softmax_scale, softcap, sinks), metadata)
    in_pages, decodes = k_new is None, metadata.num_decodes == metadata.num_seqs == q.shape[0]
    if q.device.type == "cpu" and in_pages and decodes and softcap == 0.0 and k_scale is None and unseen():
        out = decode.of_step(q, k_cache, v_cache, metadata, softmax_scale, window_left, chunk_size, sinks)
        if out is not None:
            dispatch.count("cpu_reference")
            return out
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

    Differentiable in q, unless rotary turns it; gradients of what is stored or turned raise UnsupportedError. Raises
    ValueError and TypeError for arguments that do not fit. After these errors nothing was stored. Lengths in a tensor
    on a GPU are not read back: new keys that they place outside of the cache are not stored.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_is_tensor(name, x)
    if (k is None) != (v is None):
        raise ValueError("k and v go together")
    if k is not None and cache_seqlens is None:
        raise ValueError("k needs cache_seqlens: where in the cache the new keys go")
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx picks rows of a dense cache; with block_table reorder the table instead")
        if cache_seqlens is None:
            raise ValueError("block_table needs cache_seqlens: how many keys each sequence has")
        check_tensor("block_table", block_table, torch.int32, (q.shape[0], None), q.device)
    if cache_leftpad is not None:
        check_tensor("cache_leftpad", cache_leftpad, torch.int32, (q.shape[0],), q.device)
    if cache_batch_idx is not None:
        # A dense cache is a paged one whose pages are whole rows.
        check_tensor("cache_batch_idx", cache_batch_idx, torch.int32, (q.shape[0],), q.device)
        block_table = cache_batch_idx.unsqueeze(1)
    caches = Caches(k_cache, v_cache, k_scale, v_scale)
    capacity = check_caches(q, caches, block_table)
    if block_table is None and k_cache.shape[0] > q.shape[0]:
        k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    if k is not None and v is not None:
        check_new(q, k, v, caches)
        refuse_gradients("storing keys and values", k, v, k_cache, v_cache, rotary_cos, rotary_sin)
        refuse_tangents("flash_attn_with_kvcache", (q, sinks))  # now: they are refused anyway, but after storing
    lengths = cache_lengths(q, 0 if k is None else k.shape[1], capacity, cache_seqlens)
    window_left, window_right = window_bounds(causal, window_size)
    follow = (window_left, window_right) != (UNBOUNDED, UNBOUNDED)
    rotary = Rotary.of(q, k, rotary_cos, rotary_sin, rotary_interleaved, follow=follow, capacity=capacity)
    args = AttentionArgs(
        q,
        k_cache,
        v_cache,
        default_scale(softmax_scale, q),
        max_seqlen_k=0 if block_table is None else capacity,
        seqused_k=lengths if k is None else lengths + k.shape[1],
        leftpad_k=cache_leftpad,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        window_left=window_left,
        window_right=window_right,
        chunk_size=chunk_size,
        softcap=softcap,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if rotary is not None:
        refuse_gradients("rotary of queries", q)
    check_args(args)
    check_cached(lengths, k, k_cache, block_table, cache_batch_idx)
    if k is not None and v is not None:
        args = replace(args, q=store_new(q, k, v, caches, lengths, block_table, rotary))
    out, lse = checked_attention(args)
    return (out, lse) if return_softmax_lse else out
