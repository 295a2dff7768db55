"""Launches quantize_fp8: queries, keys and values as the e4m3 tiles that the FP8 forward reads, with their scales."""

import ctypes
import math
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.fp8 import Fp8Config, value_parts
from attention_backend.jit import KernelVariant, load
from attention_backend.reference.fp8 import SIGN_BITS

_ALIGNMENT = 16  # bytes that a thread reads at once


class QuantizeParams(ctypes.Structure):
    """quantize_fp8.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "k_out", "v_out")),
        *((name, c_void_p) for name in ("q_scale", "k_scale", "v_scale", "v_amax")),
        *((name, c_int64) for name in ("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head")),
        *((name, c_int64) for name in ("v_batch", "v_row", "v_head")),
        *((name, c_int) for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_kv_heads")),
        *((name, c_int) for name in ("q_tiles", "k_tiles", "v_parts", "v_part_rows")),
        ("score_scale", c_float),
        ("signs", c_uint32 * 8),
    )


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """Images of shared memory (uint8) and float32 scales.

    q `[batch, num_heads, q_tiles, block_m * head_dim]`, k and v `[batch, num_kv_heads, k_tiles, block_n * head_dim]`,
    q_scale `[batch, num_heads, q_tiles * block_m]`, k_scale `[batch, num_kv_heads, k_tiles]`,
    v_scale `[batch, num_kv_heads, head_dim]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


@cache
def variant(dtype: torch.dtype, head_dim: int, config: Fp8Config, hadamard: bool, step: int) -> KernelVariant:
    """`step` 0 quantises queries and keys and measures values, step 1 quantises values."""
    defines = (
        ("BF16", int(dtype == torch.bfloat16)),
        ("HEAD_DIM", head_dim),
        ("BLOCK_M", config.block_m),
        ("BLOCK_N", config.block_n),
        ("HADAMARD", int(hadamard)),
        ("PASS", step),
    )
    return KernelVariant("quantize_fp8", "sm_90a", defines, hot=True)


def quantize(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, config: Fp8Config, *, hadamard: bool) -> Fp8Tiles:
    """q `[batch, seqlen_q, num_heads, head_dim]`, k, v `[batch, seqlen_k, num_kv_heads, head_dim]`, none empty.

    Rows that do not begin at multiples of 16 bytes are copied first. The query scales include softmax_scale * log2 e.
    """
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    q_tiles, k_tiles = -(-seqlen_q // config.block_m), -(-seqlen_k // config.block_n)
    parts, part_rows = value_parts(seqlen_k)

    def images(heads: int, tiles: int, rows: int) -> Tensor:
        return torch.empty((batch, heads, tiles, rows * head_dim), dtype=torch.uint8, device=q.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    tiles = Fp8Tiles(
        images(num_heads, q_tiles, config.block_m),
        images(num_kv_heads, k_tiles, config.block_n),
        images(num_kv_heads, k_tiles, config.block_n),
        floats(batch, num_heads, q_tiles * config.block_m),
        floats(batch, num_kv_heads, k_tiles),
        floats(batch, num_kv_heads, head_dim),
    )
    amax = floats(batch, num_kv_heads, parts, head_dim)
    p = QuantizeParams(q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), score_scale=softmax_scale * math.log2(math.e))
    p.q_out, p.k_out, p.v_out = tiles.q.data_ptr(), tiles.k.data_ptr(), tiles.v.data_ptr()
    p.q_scale, p.k_scale, p.v_scale = tiles.q_scale.data_ptr(), tiles.k_scale.data_ptr(), tiles.v_scale.data_ptr()
    p.v_amax = amax.data_ptr()
    p.q_batch, p.q_row, p.q_head = q.stride()[:3]
    p.k_batch, p.k_row, p.k_head = k.stride()[:3]
    p.v_batch, p.v_row, p.v_head = v.stride()[:3]
    p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_kv_heads = batch, seqlen_q, seqlen_k, num_heads, num_kv_heads
    p.q_tiles, p.k_tiles, p.v_parts, p.v_part_rows = q_tiles, k_tiles, parts, part_rows
    p.signs = (c_uint32 * 8)(*(SIGN_BITS >> 32 * i & 0xFFFFFFFF for i in range(8)))
    key_blocks = batch * num_kv_heads * k_tiles
    blocks = (batch * num_heads * q_tiles + key_blocks + batch * num_kv_heads * parts, key_blocks)
    threads = config.block_n * head_dim // 64  # quantize_fp8.cuh
    for step in range(2):
        kernel = load(variant(q.dtype, head_dim, config, hadamard, step), q.device.index)
        kernel((blocks[step], 1, 1), (threads, 1, 1), p)
    return tiles


def _aligned(x: Tensor) -> Tensor:
    elements = _ALIGNMENT // x.element_size()
    if x.data_ptr() % _ALIGNMENT == 0 and not any(s % elements for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
