"""Launches kv_cache_store: new keys and values into pages, with rotary on the way if asked for."""

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.params import StoreParams, pointer
from attention_backend.kernels.variants import store_variant

_THREADS = 128


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes token t to slot `slot_mapping[t]` = block * block_size + offset; negative slots are skipped.

    k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, caches `[num_blocks, Hkv, block_size, D or Dv]`, slot_mapping int64 `[T]`.
    """
    _launch(k, v, k_cache, v_cache, slot_mapping, None, None, None, None, None, interleaved=False)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """As `store`, with q and k rotated by row `positions[t]` (int32) of cos and sin `[*, rotary_dim / 2]`.

    Returns the rotated q `[T, Hq, D]`; q and k themselves stay as they are.
    """
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(k, v, k_cache, v_cache, slot_mapping, q, q_out, positions, cos, sin, interleaved=interleaved)
    return q_out


def _launch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool,
) -> None:
    if k.shape[0] == 0:
        return
    p = StoreParams()
    p.k, p.v, p.k_cache, p.v_cache = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
    p.slot_mapping = slot_mapping.data_ptr()
    p.k_row, p.k_head, p.v_row, p.v_head = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    p.k_page, p.k_cache_head, p.k_slot = k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)
    p.v_page, p.v_cache_head, p.v_slot = v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)
    p.num_kv_heads, p.head_dim, p.head_dim_v = k.shape[1], k.shape[2], v.shape[2]
    p.page_size = k_cache.shape[2]
    rotary = 0
    if q is not None and q_out is not None and cos is not None:
        rotary = 2 if interleaved else 1
        p.q, p.q_out = q.data_ptr(), q_out.data_ptr()
        p.positions, p.cos, p.sin = pointer(positions), pointer(cos), pointer(sin)
        p.q_row, p.q_head, p.q_out_row, p.q_out_head = q.stride(0), q.stride(1), q_out.stride(0), q_out.stride(1)
        p.cos_row, p.rotary_dim, p.num_heads = cos.stride(0), 2 * cos.shape[1], q.shape[1]
    index = k.device.index
    variant = store_variant(k.dtype, device.arch(index), rotary)
    load(variant, index)((k.shape[0], 1, 1), (_THREADS, 1, 1), p)
