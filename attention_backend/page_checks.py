"""Argument checks of what writes and reads the engine's pages, once a layer: so few, and without a tensor's values.

Raises ValueError for shapes, strides and devices, TypeError for dtypes. Knows no kernel.
"""

import torch
from torch import Tensor

from attention_backend.checks import FP8, check_device, check_sinks, check_tensor
from attention_backend.metadata import PagedMetadata


def check_step(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: PagedMetadata,
    sinks: Tensor | None,
) -> None:
    """Of `attention_backend.paged_attention`; the metadata has checked itself."""
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new go together")
    if q.dim() != 3:
        raise ValueError(f"q must be [tokens, heads, dim], got {tuple(q.shape)}")
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must be [num_blocks, num_kv_heads, block_size, dim], "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    (tokens, heads, dim), device = q.shape, q.device
    if dim != k_cache.shape[3] or k_cache.shape[1] == 0 or heads % k_cache.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(k_cache.shape)}: head_dim, or head ratio")
    if k_new is not None and v_new is not None:
        _check_new_rows("k_new", k_new, q, k_cache)
        _check_new_rows("v_new", v_new, q, v_cache)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {x.stride()}")
    if metadata.slot_mapping.shape[0] != tokens:
        raise ValueError(f"slot_mapping has {metadata.slot_mapping.shape[0]} slots for {tokens} rows of q")
    check_device("the metadata", metadata.slot_mapping, device)
    if sinks is not None:
        check_sinks(sinks, heads, device)


def _check_new_rows(name: str, rows: Tensor, q: Tensor, cache: Tensor) -> None:
    shape = (q.shape[0], cache.shape[1], cache.shape[3])
    if rows.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} to fit q and its cache, got {list(rows.shape)}")
    if rows.dtype != q.dtype:
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {rows.dtype}")
    check_device(name, rows, q.device)


def check_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Caches `[num_blocks, num_kv_heads, ...]` of q's dtype, or float8_e4m3fn with a scale per head, all where q is."""
    check_device("k_cache", k_cache, q.device)
    check_device("v_cache", v_cache, q.device)
    scaled = k_cache.dtype == v_cache.dtype == FP8
    if not scaled and not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != scaled:
            raise ValueError(f"{name} goes with {FP8} caches, and they with it: they are {k_cache.dtype}")
        if scale is not None:
            check_tensor(name, scale, torch.float32, (k_cache.shape[1],), q.device)


def check_rotary_store(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Of `attention_backend.layers.rotary_store`."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2]):
        raise ValueError(
            "q, k and v must be [tokens, heads, head_dim], k and v alike, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[1::2] != k.shape[1:]:
        raise ValueError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} must be [num_blocks, {k.shape[1]}, block_size, "
            f"{k.shape[2]}]"
        )
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != q.shape[0] or 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(
            f"cos and sin must be [{q.shape[0]}, rotary_dim / 2] with rotary_dim <= {q.shape[2]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not cos.dtype == sin.dtype == torch.float32 or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise TypeError(f"cos and sin must be float32 with rows alike, got {cos.dtype} and {sin.dtype}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != q.shape[:1] or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be int64 [{q.shape[0]}], contiguous, got {tuple(slot_mapping.shape)}")
    if not k.device == v.device == slot_mapping.device == cos.device == sin.device == q.device:
        places = ", ".join(str(x.device) for x in (q, k, v, slot_mapping, cos, sin))
        raise ValueError(f"q, k, v, slot_mapping, cos and sin must be on one device, got {places}")
