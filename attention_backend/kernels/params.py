"""The parameter structures of the kernels, field by field as in the .cuh files. Knows layouts only, no launch."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from math import e, log2

import torch
from torch import Tensor

from attention_backend.problem import FURTHEST, AttentionArgs

_LARGEST = torch.finfo(torch.float32).max


class SequenceParams(ctypes.Structure):
    """parts/seqlen.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "mask_desc")),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        *((name, c_int) for name in ("seqlen_q", "seqlen_k", "window_left", "window_right", "chunk_size")),
        *((name, c_int) for name in ("page_size", "page_shift", "reserved")),
    )


class ScoreParams(ctypes.Structure):
    """parts/score.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("key_mask", "bias", "alibi_slopes")),
        *((name, c_int64) for name in ("key_mask_batch", "bias_batch", "bias_head", "bias_row", "alibi_batch")),
        *((name, c_float) for name in ("softmax_scale", "softcap", "cap_log2", "per_softcap")),
    )


TENSORS = ("q", "k", "v", "out", "lse", "sinks")
STRIDES = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head"),
    *("out_batch", "out_row", "out_head", "lse_batch", "lse_head"),
)


class ForwardParams(ctypes.Structure):
    """parts/forward_params.cuh"""

    _fields_ = (
        ("sequence", SequenceParams),
        ("score", ScoreParams),
        *((name, c_void_p) for name in TENSORS),
        *((name, c_int64) for name in STRIDES),
        *((name, c_int) for name in ("head_dim", "head_dim_v", "group", "reserved")),
    )


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """An array that a kernel reads without strides. It must outlive the launch."""
    return None if tensor is None else tensor.contiguous()


def sequence_params(args: AttentionArgs) -> SequenceParams:
    p = SequenceParams()
    p.cu_seqlens_q = pointer(args.cu_seqlens_q)
    p.cu_seqlens_k = pointer(args.cu_seqlens_k)
    p.seqused_k = pointer(args.seqused_k)
    p.leftpad_k = pointer(args.leftpad_k)
    p.mask_desc = pointer(args.mask_desc)
    p.seqlen_q = args.seqlen_q
    p.window_left, p.window_right = min(args.window_left, FURTHEST), min(args.window_right, FURTHEST)
    p.chunk_size = min(args.chunk_size, FURTHEST)
    table = args.block_table
    if table is not None:
        page_size = args.k.shape[1]
        p.block_table, p.block_table_stride = table.data_ptr(), table.stride(0)
        p.seqlen_k = table.shape[1] * page_size
        p.page_size = page_size
        p.page_shift = page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1
    else:
        p.seqlen_k = args.k.shape[1] if args.cu_seqlens_k is None else args.max_seqlen_k
    return p


def score_params(args: AttentionArgs) -> ScoreParams:
    p = ScoreParams(softmax_scale=args.softmax_scale, softcap=args.softcap)
    if args.softcap:
        p.per_softcap = min(1 / args.softcap, _LARGEST)
        p.cap_log2 = min(2 * log2(e) * args.softmax_scale / args.softcap, _LARGEST)
    if args.key_mask is not None:
        p.key_mask = args.key_mask.data_ptr()
        p.key_mask_batch = args.key_mask.stride(0)
    if args.alibi_slopes is not None:
        p.alibi_slopes = args.alibi_slopes.data_ptr()
        p.alibi_batch = args.alibi_slopes.stride(0) if args.alibi_slopes.dim() == 2 else 0
    if args.bias is not None:
        bias = args.bias
        p.bias = bias.data_ptr()
        p.bias_batch, p.bias_head, p.bias_row = (bias.stride(d) if bias.shape[d] > 1 else 0 for d in range(3))
    return p


def fill_tensors(p: ctypes.Structure, args: AttentionArgs, out: Tensor, lse: Tensor) -> Tensor | None:
    """Sets q, k, v, out, lse, sinks and their strides. Returns the float32 sinks, which must outlive the launch.

    out and lse may have more dimensions in front of their own: their first elements are meant.
    """
    q, k, v = args.q, args.k, args.v
    p.q, p.k, p.v, p.out, p.lse = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
    sinks = None if args.sinks is None else args.sinks.to(torch.float32).contiguous()
    p.sinks = pointer(sinks)
    strides, lse_strides = q.stride(), lse.stride()
    p.lse_head = lse_strides[-2]
    if len(strides) == 4:
        p.q_batch, p.q_row, p.q_head, _ = strides
        p.out_batch, p.out_row, p.out_head = out.stride()[-4:-1]
        p.lse_batch = lse_strides[-3]
    else:
        p.q_row, p.q_head, _ = strides
        p.out_row, p.out_head = out.stride()[-3:-1]
    strides = k.stride()
    if len(strides) == 4:
        p.k_batch, p.k_row, p.k_head, _ = strides
        p.v_batch, p.v_row, p.v_head, _ = v.stride()
    else:
        p.k_row, p.k_head, _ = strides
        p.v_row, p.v_head, _ = v.stride()
    p.head_dim, p.head_dim_v = q.shape[-1], v.shape[-1]
    p.group = args.num_heads // args.num_kv_heads
    return sinks
