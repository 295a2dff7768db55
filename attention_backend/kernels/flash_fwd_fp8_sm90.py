"""Launches flash_fwd_fp8_sm90, the Hopper forward at 8 bits. Assumes that attention_backend.fp8 checked the problem."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.fp8 import HEAD_DIMS, Fp8Config, fp8_config, section_heads, splits_of_last_round
from attention_backend.jit import KernelVariant, load
from attention_backend.kernels import device, quantize_fp8, workspace
from attention_backend.kernels.quantize_fp8 import Fp8Tiles


class Fp8Params(ctypes.Structure):
    """parts/forward_fp8_tiles.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "out", "lse")),
        *((name, c_void_p) for name in ("parts", "counters")),
        *((name, c_int) for name in ("seqlen_q", "seqlen_k", "num_heads", "group")),
        *((name, c_int) for name in ("q_tiles", "k_tiles", "section", "causal")),
        *((name, c_int) for name in ("whole", "cut", "splits")),
    )


@cache
def variant(dtype: torch.dtype, head_dim: int, config: Fp8Config) -> KernelVariant:
    defines = (
        ("BF16", int(dtype == torch.bfloat16)),
        ("HEAD_DIM", head_dim),
        ("BLOCK_M", config.block_m),
        ("BLOCK_N", config.block_n),
        ("STAGES", config.stages),
    )
    return KernelVariant("flash_fwd_fp8_sm90", "sm_90a", defines, hot=True)


def covering_set() -> Iterator[KernelVariant]:
    """The kernel of every head_dim in both dtypes; the quantisation of each once: head_dim, dtype, rotated or not."""
    for head_dim in HEAD_DIMS:
        config = fp8_config(head_dim)
        for dtype in (torch.bfloat16, torch.float16):
            yield variant(dtype, head_dim, config)
        half = head_dim == 64
        for step in range(2):
            yield quantize_fp8.variant(torch.float16 if half else torch.bfloat16, head_dim, config, not half, step)


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, *, causal: bool, hadamard: bool
) -> tuple[Tensor, Tensor]:
    """Dense attention: out shaped like q, lse float32 `[batch, num_heads, seqlen_q]`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    config = fp8_config(q.shape[-1])
    tiles = quantize_fp8.quantize(q, k, v, softmax_scale, config, hadamard=hadamard)
    attend(tiles, k.shape[1], out, lse, config, causal=causal)
    return out, lse


def attend(tiles: Fp8Tiles, seqlen_k: int, out: Tensor, lse: Tensor, config: Fp8Config, *, causal: bool) -> None:
    """The attention itself: writes out `[batch, seqlen_q, num_heads, head_dim]` and lse, both contiguous."""
    batch, seqlen_q, num_heads, head_dim = out.shape
    q_tiles, k_tiles = tiles.q.shape[2], tiles.k.shape[2]
    p = Fp8Params(out=out.data_ptr(), lse=lse.data_ptr(), seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=int(causal))
    p.q, p.k, p.v = tiles.q.data_ptr(), tiles.k.data_ptr(), tiles.v.data_ptr()
    p.q_scale, p.k_scale, p.v_scale = tiles.q_scale.data_ptr(), tiles.k_scale.data_ptr(), tiles.v_scale.data_ptr()
    p.num_heads, p.group = num_heads, num_heads // tiles.k.shape[1]
    p.q_tiles, p.k_tiles = q_tiles, k_tiles
    p.section = section_heads(num_heads, p.group, seqlen_k, head_dim)
    all_tiles, num_sms = batch * num_heads * q_tiles, device.num_sms(out.device.index)
    p.splits = 1 if causal else splits_of_last_round(all_tiles, k_tiles, num_sms)
    p.cut = all_tiles % num_sms if p.splits > 1 else 0
    p.whole = all_tiles - p.cut
    units = p.whole + p.cut * p.splits
    parts = torch.empty(p.cut * p.splits * config.part_floats(head_dim), dtype=torch.float32, device=out.device)
    counters = workspace.counters(out.device, config.counters(p.cut))
    p.parts, p.counters = parts.data_ptr(), counters.data_ptr()
    kernel = load(variant(out.dtype, head_dim, config), out.device.index)
    kernel((min(units, num_sms), 1, 1), (config.threads, 1, 1), p, config.smem_bytes(head_dim))
    del parts, counters  # kept alive until the launch was queued; the allocator is ordered by stream after that
