"""Launches rotary_store: queries and keys normalised and turned, keys and values into their pages. Assumes that shapes
were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant, capability_of
from attention_backend.kernels import device
from attention_backend.kernels.decode_variants import FP8_FROM
from attention_backend.kernels.params import contiguous, pointer
from attention_backend.kernels.rows import VECTOR, begins_vectors, check_rows, element_define

_THREADS = 128
_PAIR = 2 * VECTOR  # elements of a lane
_TABLE_VECTOR = 4  # float32 elements in 16 bytes
_LANES = (2, 4, 8, 16, 32)  # of a head
_SLOTS = 1 << 31  # the kernel counts them in 32 bits
_FP8 = torch.float8_e4m3fn


class RotaryStoreParams(ctypes.Structure):
    """rotary_store.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "k_cache", "v_cache", "slot_mapping")),
        *((name, c_void_p) for name in ("cos", "sin", "q_norm", "k_norm", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, c_int64) for name in ("k_page", "k_slot", "k_cache_head", "v_page", "v_slot", "v_cache_head")),
        ("table_row", c_int64),
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, c_int) for name in ("page_size", "token_blocks")),
        ("eps", c_float),
        ("reserved", c_int),
    )


def refuses(head_dim: int, rotary_dim: int) -> str | None:
    """Why these sizes have no kernel; None: they have one."""
    if head_dim % _PAIR or rotary_dim % _PAIR or head_dim > _PAIR * _LANES[-1]:
        return (
            f"head_dim {head_dim} with rotary_dim {rotary_dim}: they must be multiples of {_PAIR}, and head_dim "
            f"{_PAIR * _LANES[-1]} at most"
        )
    return None


@cache
def variant(dtype: torch.dtype, head_dim: int, arch: str, norm: int, *, fp8_kv: bool) -> tuple[KernelVariant, int]:
    """The kernel, and its lanes of a head. `norm`: 0, 1 (times weight) or 2 (times 1 + weight)."""
    if fp8_kv and capability_of(arch) < FP8_FROM:
        raise UnsupportedError(f"{arch} does not convert float8_e4m3fn: it needs sm_89")
    lanes = next(n for n in _LANES if n * _PAIR >= head_dim)
    defines = (element_define(dtype), ("LANES", lanes), ("NORM", norm), ("FP8_KV", int(fp8_kv)))
    return KernelVariant("rotary_store", arch, defines, hot=True), lanes


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    for head_dim in (32, 64, 128, 256):
        yield variant(main, head_dim, arch, 0, fp8_kv=False)[0]
    for dtype, head_dim, norm in ((main, 512, 1), (main, 128, 1), (main, 256, 2), (other, 128, 0), (other, 128, 1)):
        yield variant(dtype, head_dim, arch, norm, fp8_kv=False)[0]
    if capability_of(arch) >= FP8_FROM:
        for head_dim, norm in ((64, 0), (128, 0), (128, 1), (256, 2)):
            yield variant(main, head_dim, arch, norm, fp8_kv=True)[0]


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    *,
    unit_offset: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    early: bool = False,
) -> Tensor:
    """q `[T, Hq, D]`, k and v `[T, Hkv, D]` of any row strides; see `attention_backend.layers.rotary_store`.

    `early`: may start before the previous kernel has ended.
    Raises UnsupportedError for sizes without a kernel and for rows that are not 16-byte aligned.
    """
    reason = refuses(q.shape[2], 2 * cos.shape[1])
    if reason is not None:
        raise UnsupportedError(reason)
    fp8_kv = k_cache.dtype == _FP8
    check_rows(q=q, k=k, v=v)
    if q_norm is not None and k_norm is not None:
        check_rows(q_norm=q_norm, k_norm=k_norm)
    check_tables(cos=cos, sin=sin)
    check_pages(k_cache, v_cache, k_scale, v_scale)
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = q.new_empty(tokens, num_heads, head_dim)
    if not tokens:
        return out
    k_scale, v_scale = contiguous(k_scale), contiguous(v_scale)
    norm = 0 if q_norm is None else 1 + unit_offset
    kernel, lanes = _kernel(q.dtype, head_dim, q.device.index, norm, fp8_kv)
    p = RotaryStoreParams(q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), q_out=out.data_ptr())
    p.k_cache, p.v_cache, p.slot_mapping = k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr()
    p.cos, p.sin, p.table_row = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
    p.q_norm, p.k_norm = pointer(q_norm), pointer(k_norm)
    p.k_scale, p.v_scale = pointer(k_scale), pointer(v_scale)
    p.q_row, p.q_head, _ = q.stride()
    p.k_row, p.k_head, _ = k.stride()
    p.v_row, p.v_head, _ = v.stride()
    p.k_page, p.k_cache_head, p.k_slot, _ = k_cache.stride()
    p.v_page, p.v_cache_head, p.v_slot, _ = v_cache.stride()
    p.num_heads, p.num_kv_heads, p.head_dim, p.rotary_dim = num_heads, num_kv_heads, head_dim, 2 * cos.shape[1]
    p.page_size, p.eps = k_cache.shape[2], eps
    p.token_blocks = -(-(num_heads + 2 * num_kv_heads) * lanes // _THREADS)
    kernel((tokens * p.token_blocks, 1, 1), (_THREADS, 1, 1), p, early=early)
    return out


@cache
def _kernel(dtype: torch.dtype, head_dim: int, index: int, norm: int, fp8_kv: bool) -> tuple[Kernel, int]:
    """The kernel on a device, and its lanes of a head."""
    chosen, lanes = variant(dtype, head_dim, device.arch(index), norm, fp8_kv=fp8_kv)
    return load(chosen, index), lanes


def check_tables(**tables: Tensor) -> None:
    """Raises UnsupportedError for tables whose rows cannot be read 4 elements at a time."""
    for name, table in tables.items():
        if not begins_vectors(table, _TABLE_VECTOR):
            raise UnsupportedError(
                f"{name} of strides {table.stride()}: its rows are read {_TABLE_VECTOR} elements at a time: they must "
                "begin at multiples of 16 bytes"
            )


def check_pages(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raises UnsupportedError for pages whose rows cannot be written 8 elements at a time, and for too many slots."""
    if k_cache.dtype == _FP8 and (k_scale is None or v_scale is None):
        raise ValueError("float8_e4m3fn caches need k_scale and v_scale")
    for name, cache_ in (("k_cache", k_cache), ("v_cache", v_cache)):
        page, head, slot, element = cache_.stride()
        if element != 1 or cache_.data_ptr() % 16 or page % VECTOR or head % VECTOR or slot % VECTOR:
            raise UnsupportedError(
                f"{name} with strides {cache_.stride()}: rows are stored {VECTOR} elements at a time: they must be "
                "contiguous and aligned"
            )
    if k_cache.shape[0] * k_cache.shape[2] > _SLOTS:
        raise UnsupportedError(f"a cache of {k_cache.shape[0] * k_cache.shape[2]} slots: at most {_SLOTS} are counted")
