"""Launches dequantize_pages: float8 pages that some sequences see, as pages that every kernel reads."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant, capability_of
from attention_backend.kernels import device
from attention_backend.kernels.decode_variants import FP8_FROM
from attention_backend.kernels.params import pointer

_THREADS = 256
_VECTOR = 16  # elements of a thread at a time
_FAR = 1 << 30  # wider than any window


class DequantizeParams(ctypes.Structure):
    """dequantize_pages.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "k_out", "v_out", "k_scale", "v_scale")),
        *((name, c_void_p) for name in ("block_table", "seq_lens", "cu_seqlens_q")),
        ("table_row", c_int64),
        *((name, c_int64) for name in ("k_page", "k_head", "k_slot", "v_page", "v_head", "v_slot")),
        *((name, c_int) for name in ("heads", "page_size", "head_dim", "head_dim_v", "seqlen_q", "window_left")),
    )


@cache
def dequantize_variant(dtype: torch.dtype, arch: str) -> KernelVariant:
    if capability_of(arch) < FP8_FROM:
        raise UnsupportedError(f"{arch} does not convert float8_e4m3fn: it needs sm_89")
    return KernelVariant("dequantize_pages", arch, (("BF16", int(dtype == torch.bfloat16)),), hot=True)


def dequantize(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    seqlen_q: int,
    window_left: int,
    k_out: Tensor,
    v_out: Tensor,
) -> None:
    """See `attention_backend.fp8_pages.dequantize_pages_op`; k_out and v_out of two bytes an element.

    Raises UnsupportedError for rows that are not 16-byte aligned, or before sm_89.
    """
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        odd = any(s % _VECTOR for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        if odd or x.stride(-1) != 1 or x.data_ptr() % _VECTOR or x.shape[-1] % _VECTOR:
            raise UnsupportedError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: rows are read {_VECTOR} bytes at a time: "
                f"they must be contiguous, and begin and end at multiples of {_VECTOR} elements"
            )
    batch, width = block_table.shape
    if batch == 0 or width == 0:
        return
    k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    p = DequantizeParams(k_cache.data_ptr(), v_cache.data_ptr(), k_out.data_ptr(), v_out.data_ptr())
    p.k_scale, p.v_scale = k_scale.data_ptr(), v_scale.data_ptr()
    p.block_table, p.table_row = block_table.data_ptr(), block_table.stride(0)
    p.seq_lens, p.cu_seqlens_q = seq_lens.data_ptr(), pointer(cu_seqlens_q)
    p.k_page, p.k_head, p.k_slot = k_cache.stride()[:3]
    p.v_page, p.v_head, p.v_slot = v_cache.stride()[:3]
    p.heads, p.page_size, p.head_dim, p.head_dim_v = *k_cache.shape[1:], v_cache.shape[3]
    p.seqlen_q, p.window_left = seqlen_q, min(window_left, _FAR)
    index = k_cache.device.index
    kernel = load(dequantize_variant(k_out.dtype, device.arch(index)), index)
    kernel((width, batch, 1), (_THREADS, 1, 1), p)
