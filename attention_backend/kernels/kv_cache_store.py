"""Launches kv_cache_store: new keys and values into pages, with rotary on the way if asked for."""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.decode_params import StoreParams
from attention_backend.kernels.decode_variants import store_variant
from attention_backend.kernels.params import contiguous, pointer

_THREADS = 128
_ALIGNMENT = 16  # bytes that a thread moves at once
_HALVES, _INTERLEAVED = 1, 2  # ROTARY of the kernel


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token t to slot `slot_mapping[t]` = block * block_size + offset; negative slots are skipped.

    k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, caches `[num_blocks, Hkv, block_size, D or Dv]`, slot_mapping int64 `[T]`.
    float8_e4m3fn caches need the scales, float32 `[Hkv]`: what is stored is the value over its head's scale, within
    +-448. Raises UnsupportedError for rows that are not 16-byte aligned, or for float8 before sm_89.
    """
    if k.shape[0]:
        k_scale, v_scale = contiguous(k_scale), contiguous(v_scale)
        p = _params(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        _launch(p, k, k.shape[0], 0, _is_fp8(k_cache))


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """As `store`, with q `[Tq, Hq, D]` and k rotated by rows `q_positions` and `k_positions` (int32) of cos and sin
    `[seqlen_ro, rotary_dim / 2]`, which are of k's dtype.

    Returns the rotated q; q and k themselves stay as they are.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    cos, sin, k_scale, v_scale = cos.contiguous(), sin.contiguous(), contiguous(k_scale), contiguous(v_scale)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    p = _params(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    p.q, p.q_out = q.data_ptr(), q_out.data_ptr()
    p.q_positions, p.k_positions = q_positions.data_ptr(), k_positions.data_ptr()
    p.cos, p.sin, p.cos_row = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
    p.rotary_dim, p.rotary_rows = 2 * cos.shape[1], cos.shape[0]
    p.q_row, p.q_head, p.q_out_row, p.q_out_head = q.stride(0), q.stride(1), q_out.stride(0), q_out.stride(1)
    p.num_heads, p.num_queries = q.shape[1], q.shape[0]
    blocks = max(q.shape[0], k.shape[0])
    if blocks:
        _launch(p, k, blocks, _INTERLEAVED if interleaved else _HALVES, _is_fp8(k_cache))
    return q_out


def _is_fp8(cache: Tensor) -> bool:
    return cache.dtype == torch.float8_e4m3fn


def _params(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> StoreParams:
    if _is_fp8(k_cache) and (k_scale is None or v_scale is None):
        raise ValueError("float8_e4m3fn caches need k_scale and v_scale")
    for name, x in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        vector = _ALIGNMENT // x.element_size()
        odd = any(s % vector for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        if odd or x.stride(-1) != 1 or x.data_ptr() % _ALIGNMENT or x.shape[-1] % vector:
            raise UnsupportedError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: rows are stored {_ALIGNMENT} bytes at a "
                f"time: they must be contiguous, and begin and end at multiples of {vector} elements"
            )
    p = StoreParams()
    p.k, p.v, p.k_cache, p.v_cache = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
    p.slot_mapping = slot_mapping.data_ptr()
    p.k_scale, p.v_scale = pointer(k_scale), pointer(v_scale)
    p.k_row, p.k_head, p.v_row, p.v_head = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    p.k_page, p.k_cache_head, p.k_slot = k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)
    p.v_page, p.v_cache_head, p.v_slot = v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)
    p.num_tokens, p.num_kv_heads, p.head_dim, p.head_dim_v = k.shape[0], k.shape[1], k.shape[2], v.shape[2]
    p.page_size = k_cache.shape[2]
    return p


def _launch(p: StoreParams, k: Tensor, blocks: int, rotary: int, fp8_kv: bool) -> None:
    index = k.device.index
    variant = store_variant(k.dtype, device.arch(index), rotary, fp8_kv=fp8_kv)
    load(variant, index)((blocks, 1, 1), (_THREADS, 1, 1), p)
