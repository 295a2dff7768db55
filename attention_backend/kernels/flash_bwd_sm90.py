"""Launches the Hopper backward, flash_bwd_sm90 or flash_bwd_pair_sm90, with what goes before and after it.

Assumes a checked problem.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention_backend.heuristics.sm90_backward import BackwardTile, held_units, query_parts, section_lines
from attention_backend.jit import load
from attention_backend.kernels import device, workspace
from attention_backend.kernels.backward_params import set_strides
from attention_backend.kernels.dropout_params import dropout_params
from attention_backend.kernels.flash_bwd_parts import new_parts, sum_parts, tapered
from attention_backend.kernels.flash_bwd_rows import padded_rows, row_terms, sinks_gradient
from attention_backend.kernels.hopper_backward_params import BackwardParams, RowsOfDqParams
from attention_backend.kernels.hopper_backward_variants import BackwardOptions, backward_variant, postprocess_variant
from attention_backend.kernels.params import pointer, score_params, sequence_params
from attention_backend.kernels.tensor_map import plain_tensor_map, tensor_map
from attention_backend.problem import AttentionArgs
from attention_backend.reference.gradients import Gradients

_ROWS = 64  # of a chunk of dQ, and keys of a box of dK or dV
_COUNTERS = 2  # of the order of work


def backward(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    tile: BackwardTile | None = None,
) -> Gradients:
    """Gradients on a Hopper GPU; `out` and `lse` are forward's, `grad_lse` is like lse, `grad_out` like out. `tile` is
    one of the problem's `backward_tiles`, by default `BackwardOptions.tile`.

    Extra memory is linear: float32 dQ of query rows (padded to 64 columns and, a sequence, 128 rows), of as many heads
    as `held_units` says or of all, two floats a row, and where key tiles are too few to fill the GPU, float32 dK and
    dV of each part of a group's query heads.
    """
    dq = args.q.new_empty(args.q.shape)
    # Keys behind the last sequence belong to no block.
    new = torch.Tensor.new_zeros if args.cu_seqlens_k is not None else torch.Tensor.new_empty
    dk, dv = new(args.k, args.k.shape), new(args.v, args.v.shape)
    dsinks = None if args.sinks is None else torch.zeros_like(args.sinks)
    seqlen_k = args.k.shape[1] if args.cu_seqlens_k is None else args.max_seqlen_k
    if 0 in (out.numel(), args.k.numel(), args.seqlen_q, seqlen_k):
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), None, dsinks)
    if args.cu_seqlens_q is not None:
        dq.zero_()
    dsinks = _launch(args, out, lse, grad_out, grad_lse, tile, seqlen_k, (dq, dk, dv))
    return Gradients(dq, dk, dv, None, dsinks)


def _launch(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    tile: BackwardTile | None,
    seqlen_k: int,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    """Into `gradients`, of queries, keys and values; those of sinks are returned."""
    dq, dk, dv = gradients
    index = args.q.device.index
    group, lines = args.num_heads // args.num_kv_heads, args.num_kv_heads * args.batch
    options = BackwardOptions.of(args, deterministic=args.deterministic)
    tile = tile or options.tile
    key_tiles = -(-seqlen_k // tile.block_n)
    workers = device.num_sms(index) // tile.cluster
    parts = query_parts(
        tile,
        seqlen_q=args.seqlen_q,
        key_tiles=key_tiles,
        lines=lines,
        group=group,
        num_sms=workers,
        tapered=tapered(args),
        deterministic=args.deterministic,
    )
    options = replace(options, parts=parts > 1)
    dense = args.cu_seqlens_q is None and args.cu_seqlens_k is None
    can_finish = dense and options.can_finish(tile)
    blocks = min(key_tiles * lines * parts, workers) * tile.cluster

    section = section_lines(
        tile,
        seqlen_q=args.seqlen_q,
        group=group // parts,
        lines=lines * parts,
        key_tiles=key_tiles,
        num_sms=workers,
        deterministic=args.deterministic,
        finishes=can_finish,
    )

    rows, units, unit_heads = padded_rows(args), lines * parts, group // parts
    held, lag = held_units(units, section) if can_finish else (units, units)
    variant, _ = backward_variant(replace(options, finishes=lag < units), tile)
    heads, sums_head = (
        (args.num_heads, rows) if args.cu_seqlens_q is not None else (held * unit_heads, rows // args.batch)
    )
    sums = args.q.new_empty((heads, sums_head, tile.slabs * 64), dtype=torch.float32)
    progress = None if lag == units else args.q.new_empty(units, dtype=torch.int32)
    terms = row_terms(args, out, lse, grad_out, grad_lse, zeroed=sums, counters=progress)
    to_k, to_v = dk, dv
    if parts > 1:
        to_k, to_v = (new_parts(x, parts, zeroed=args.cu_seqlens_k is not None) for x in (dk, dv))
    turns = None
    if args.deterministic:
        turns = dq.new_zeros((args.num_heads, rows // _ROWS, tile.slabs), dtype=torch.int32)
    counters = workspace.counters(args.q.device, _COUNTERS)

    p = BackwardParams(sequence=sequence_params(args), score=score_params(args))
    if args.dropout_threshold:
        p.dropout = dropout_params(args)
    p.sums, p.counters, p.turns = sums.data_ptr(), counters.data_ptr(), pointer(turns)
    p.dq, p.progress, p.sums_head, p.held_units, p.lag = dq.data_ptr(), pointer(progress), sums_head, held, lag
    set_strides(p, "dq", dq)
    _set_keys(p, "dk", to_k, parts)
    _set_keys(p, "dv", to_v, parts)
    p.padded_rows, p.head_dim, p.head_dim_v = rows, args.head_dim, args.head_dim_v
    p.group, p.parts, p.kv_heads, p.batch, p.key_tiles = group, parts, args.num_kv_heads, args.batch, key_tiles
    p.section, p.unit_heads = section, unit_heads
    p.share_chunks = -(-unit_heads * (sums_head // _ROWS) * tile.slabs // key_tiles)
    q, o = (tensor_map(x, tile.block_m) for x in (args.q, grad_out))
    k, v = (tensor_map(x, tile.block_n) for x in (args.k, args.v))
    lse2, delta = (plain_tensor_map(x, tile.block_m) for x in (terms.lse2, terms.delta))
    # Float32 parts, and those of wide heads, are written without the TMA.
    sent = () if parts > 1 or tile.is_pair else tuple(tensor_map(x, _ROWS) for x in (dk, dv))
    load(variant, index)((blocks, 1, 1), (tile.threads, 1, 1), (q, k, v, o, lse2, delta, *sent, p), tile.smem_bytes)
    del counters, turns, progress  # kept until the launch was queued

    _store_dq(args, tile, sums, dq, first_head=(units - lag) * unit_heads)
    if parts > 1:
        sum_parts((to_k, to_v), (dk, dv))
    return None if args.sinks is None else sinks_gradient(args.sinks, terms)


def _set_keys(p: BackwardParams, name: str, x: Tensor, parts: int) -> None:
    setattr(p, name, x.data_ptr())
    setattr(p, f"{name}_row", x.stride(-3))
    setattr(p, f"{name}_head", x.stride(-2))
    inner = x if parts == 1 else x[0]
    if inner.dim() == 4:
        setattr(p, f"{name}_batch", inner.stride(0))
    if parts > 1:
        setattr(p, f"{name}_part", x.stride(0))


def _store_dq(args: AttentionArgs, tile: BackwardTile, sums: Tensor, dq: Tensor, first_head: int) -> None:
    """Of `first_head` and those after it, of dense sequences' heads, one after another."""
    p = RowsOfDqParams(sums=sums.data_ptr(), dq=dq.data_ptr(), sums_head=sums.shape[1], seqlen_q=args.seqlen_q)
    p.cu_seqlens_q, p.head_dim, p.scale = pointer(args.cu_seqlens_q), args.head_dim, args.softmax_scale
    p.heads, p.held_heads, p.first_head = args.num_heads, sums.shape[0], first_head
    set_strides(p, "dq", dq)
    sequences = args.batch - first_head // args.num_heads
    grid = (-(-args.seqlen_q // _ROWS), args.num_heads * -(-args.head_dim // 64), sequences)
    load(postprocess_variant(args.dtype, tile.slabs), args.q.device.index)(grid, (128, 1, 1), p)
