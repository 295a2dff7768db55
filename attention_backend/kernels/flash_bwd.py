"""Launches flash_bwd_sm80, the generic backward: rows' terms, dK and dV and float32 sums of dQ, dQ's rows.

Assumes a problem that `attention_backend.backward` checked. Extra memory is linear: 4 bytes per element of dQ, and
float32 parts of dK and dV where several blocks share a group of query heads.
"""

import torch
from torch import Tensor

from attention_backend.heuristics.sm80_backward import group_parts, is_short, section_lines
from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.backward_params import BackwardParams, QueryGradientParams, set_strides
from attention_backend.kernels.backward_variants import backward_variant, postprocess_variant
from attention_backend.kernels.dropout_params import dropout_params
from attention_backend.kernels.flash_bwd_parts import new_parts, sum_parts, tapered
from attention_backend.kernels.flash_bwd_rows import RowTerms, padded_rows, row_terms, sinks_gradient
from attention_backend.kernels.params import pointer, score_params, sequence_params
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs
from attention_backend.reference.gradients import Gradients

_POSTPROCESS_ROWS = 64  # of a block
_L2_SHARE = 4  # sections of the whole L2 are fetched more than once
_POSTPROCESS_THREADS = 128


def backward(
    args: AttentionArgs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None = None
) -> Gradients:
    """`out` and `lse` are forward's; `grad_out` is shaped like out with 16-byte aligned rows, `grad_lse` like lse.

    With `args.deterministic` the sums are taken in one order, so that repeated calls give the same bits.
    """
    dq = _gradient_of(args.q, args.cu_seqlens_q)
    dk, dv = (_gradient_of(x, args.cu_seqlens_k) for x in (args.k, args.v))
    if args.q.numel() == 0 or args.k.numel() == 0:
        dsinks = None if args.sinks is None else torch.zeros_like(args.sinks)
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), None, dsinks)
    options = Options.of(args)
    rows, tile = padded_rows(args), options.tiles[0]
    dq_sums = args.q.new_empty((args.num_heads, rows, tile), dtype=torch.float32)
    terms = row_terms(args, out, lse, grad_out, grad_lse, zeroed=dq_sums)
    _main(args, options, grad_out, terms, dq_sums, dk, dv)
    _query_gradient(args, dq_sums, dq)
    return Gradients(dq, dk, dv, None, None if args.sinks is None else sinks_gradient(args.sinks, terms))


def _gradient_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Contiguous. Rows past the last sequence belong to nobody and are not visited: they are zero."""
    return x.new_empty(x.shape) if cu_seqlens is None else x.new_zeros(x.shape)


def _main(
    args: AttentionArgs, options: Options, grad_out: Tensor, terms: RowTerms, dq_sums: Tensor, dk: Tensor, dv: Tensor
) -> None:
    index = args.q.device.index
    p = BackwardParams(sequence=sequence_params(args), score=score_params(args))
    short = is_short(max(options.tiles), p.sequence.seqlen_k, tapered=tapered(args))
    variant, config = backward_variant(options, device.arch(index), args.deterministic, short=short)
    p.q, p.k, p.v, p.grad_out = args.q.data_ptr(), args.k.data_ptr(), args.v.data_ptr(), grad_out.data_ptr()
    p.lse2, p.delta, p.dq_sums = terms.lse2.data_ptr(), terms.delta.data_ptr(), dq_sums.data_ptr()
    p.dk, p.dv = dk.data_ptr(), dv.data_ptr()
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v), ("grad_out", grad_out), ("dk", dk), ("dv", dv)):
        set_strides(p, name, x)
    rows = p.padded_rows = terms.lse2.shape[1]
    p.head_dim, p.head_dim_v = args.head_dim, args.head_dim_v
    p.group = args.num_heads // args.num_kv_heads
    key_tiles = (p.sequence.seqlen_k + config.block_n - 1) // config.block_n
    blocks = key_tiles * args.num_kv_heads * args.batch
    p.parts = group_parts(blocks, p.group, device.num_sms(index), tapered=tapered(args))
    parts = None
    if p.parts > 1:
        varlen = args.cu_seqlens_k is not None
        parts = new_parts(dk, p.parts, zeroed=varlen), new_parts(dv, p.parts, zeroed=varlen)
        p.dk_parts, p.dv_parts = (x.data_ptr() for x in parts)
        p.dk_part, p.dv_part = dk.numel(), dv.numel()
    turns = None
    if args.deterministic:
        turns = torch.zeros((args.num_heads, rows // config.block_m), dtype=torch.int32, device=dq_sums.device)
        p.turns = pointer(turns)
    p.kv_heads, p.lines = args.num_kv_heads, args.num_kv_heads * p.parts * args.batch
    section = section_lines(
        config,
        *options.tiles,
        rows=args.seqlen_q * p.group // p.parts,
        lines=p.lines,
        key_tiles=key_tiles,
        num_sms=device.num_sms(index),
        l2_bytes=device.l2_bytes(index) // _L2_SHARE,
        tapered=tapered(args),
    )
    grid = (section, key_tiles, -(-p.lines // section))
    smem = config.smem_bytes(*options.tiles)
    load(variant, index)(grid, (config.threads, 1, 1), (p, dropout_params(args)) if options.dropout else p, smem)
    if parts is not None:
        sum_parts(parts, (dk, dv))


def _query_gradient(args: AttentionArgs, dq_sums: Tensor, dq: Tensor) -> None:
    index = args.q.device.index
    p = QueryGradientParams(scale=args.softmax_scale, seqlen_q=args.seqlen_q, head_dim=args.head_dim)
    p.cu_seqlens_q, p.dq_sums, p.dq = pointer(args.cu_seqlens_q), dq_sums.data_ptr(), dq.data_ptr()
    p.padded_rows = dq_sums.shape[1]
    set_strides(p, "dq", dq)
    kernel = load(postprocess_variant(args.dtype, args.head_dim, device.arch(index)), index)
    tiles = (args.seqlen_q + _POSTPROCESS_ROWS - 1) // _POSTPROCESS_ROWS
    kernel((tiles, args.num_heads, args.batch), (_POSTPROCESS_THREADS, 1, 1), p)
