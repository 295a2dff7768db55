"""Launches linear attention: states of segments, their prefix sums, outputs. Shapes were checked by the caller."""

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.linear_variants import (
    HEAD_DIMS,
    PREFIX_THREADS,
    LinearKernel,
    LinearOptions,
    causal_kernel,
    full_kernel,
    prefix_kernel,
    segments,
    states_kernel,
)
from attention_backend.reference.linear import FeatureMap

_HALVES = (torch.bfloat16, torch.float16)


class LinearParams(ctypes.Structure):
    """parts/linear_tiles.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "states")),
        *((name, c_int64) for name in ("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head")),
        *((name, c_int64) for name in ("v_batch", "v_row", "v_head", "out_batch", "out_row", "out_head")),
        *((name, c_int) for name in ("batch", "num_heads", "num_kv_heads", "group", "seqlen_q", "seqlen_k")),
        *((name, c_int) for name in ("segments", "segment_length", "row_blocks", "block_rows")),
    )


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, feature_map: FeatureMap, normalize: bool) -> Tensor:
    """q `[batch, seqlen_q, num_heads, D]`, k, v `[batch, seqlen_k, num_kv_heads, D]` -> out shaped like q.

    Causal: one launch when a segment is as long as the sequence, else three (states, prefix, outputs). Full: two, or
    three with several segments. Raises UnsupportedError for what the kernels do not serve.
    """
    _refuse(q, k, v)
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    if k.shape[1] == 0:
        return out.zero_()
    options = LinearOptions(q.dtype, q.shape[3], feature_map, normalize)
    p = _params(q, k, v, out)
    return _causal(p, options, out) if causal else _full(p, options, out)


def _causal(p: LinearParams, options: LinearOptions, out: Tensor) -> Tensor:
    index = out.device.index
    arch = device.arch(index)
    kernel = causal_kernel(options, arch)
    slots = kernel.blocks_per_sm * device.num_sms(index)
    pieces = segments(p.seqlen_q, p.batch * p.num_heads, slots, state_tokens=2 * options.head_dim, again=1.5)
    p.segments, p.segment_length = pieces.count, pieces.length
    if pieces.count > 1:
        states = _states(p, options, out)
        _launch(states_kernel(options, arch), (pieces.count - 1) * p.batch * p.num_kv_heads, p, index)
        _sum_states(p, options, arch, index, causal=True)
        _launch(kernel, pieces.count * p.batch * p.num_heads, p, index)
        del states  # kept alive until the launches were queued; the allocator is ordered by stream after that
    else:
        _launch(kernel, p.batch * p.num_heads, p, index)
    return out


def _full(p: LinearParams, options: LinearOptions, out: Tensor) -> Tensor:
    index = out.device.index
    arch = device.arch(index)
    first = states_kernel(options, arch)
    sms = device.num_sms(index)
    pieces = segments(
        p.seqlen_k, p.batch * p.num_kv_heads, first.blocks_per_sm * sms, state_tokens=2 * options.head_dim
    )
    p.segments, p.segment_length = pieces.count, pieces.length
    states = _states(p, options, out)
    _launch(first, pieces.count * p.batch * p.num_kv_heads, p, index)
    if pieces.count > 1:
        _sum_states(p, options, arch, index, causal=False)
    kernel, unit = full_kernel(options, arch)
    rows = segments(
        p.seqlen_q, p.batch * p.num_heads, kernel.blocks_per_sm * sms, unit=unit, state_tokens=options.head_dim
    )
    p.row_blocks, p.block_rows = rows.count, rows.length
    _launch(kernel, rows.count * p.batch * p.num_heads, p, index)
    del states  # as above
    return out


def _states(p: LinearParams, options: LinearOptions, out: Tensor) -> Tensor:
    """float32 [batch, num_kv_heads, segments, state]"""
    shape = (p.batch, p.num_kv_heads, p.segments, options.state_floats)
    states = torch.empty(shape, dtype=torch.float32, device=out.device)
    p.states = states.data_ptr()
    return states


def _sum_states(p: LinearParams, options: LinearOptions, arch: str, index: int, *, causal: bool) -> None:
    blocks = -(-options.state_floats // (4 * PREFIX_THREADS))
    _launch(prefix_kernel(options, arch, causal), blocks * p.batch * p.num_kv_heads, p, index)


def _launch(kernel: LinearKernel, blocks: int, p: LinearParams, index: int) -> None:
    load(kernel.variant, index)((blocks, 1, 1), (kernel.threads, 1, 1), p, kernel.smem_bytes)


def _params(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> LinearParams:
    p = LinearParams(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        for part, stride in zip(("batch", "row", "head"), x.stride(), strict=False):
            setattr(p, f"{name}_{part}", stride)
    p.batch, p.seqlen_q, p.num_heads = q.shape[:3]
    p.seqlen_k, p.num_kv_heads = k.shape[1:3]
    p.group = p.num_heads // p.num_kv_heads
    return p


def _refuse(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in _HALVES:
        raise UnsupportedError(f"linear attention on a GPU takes bfloat16 and float16, not {q.dtype}")
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_capability(q.device) < (8, 0):
        raise UnsupportedError("this GPU has no bfloat16 (it needs sm_80): use float16")
    if q.shape[3] != v.shape[3] or q.shape[3] not in HEAD_DIMS:
        raise UnsupportedError(
            f"linear attention on a GPU takes one head_dim of {', '.join(map(str, HEAD_DIMS))}, "
            f"not {q.shape[3]} and {v.shape[3]} (values)"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.data_ptr() % 16 or any(s % 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
            raise UnsupportedError(f"{name} is not 16-byte aligned: strides {x.stride()} in elements")
