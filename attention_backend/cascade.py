"""The passes of shared-prefix attention as operators: over shared pages, over each request's own, and their merge.

Arguments were checked by `shared_prefix`. Reads no lengths on the host, so a CUDA graph may record it. No gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.interface import with_plain_strides
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs
from attention_backend.reference import merge
from attention_backend.reference.tiles import compute_dtype

State = tuple[Tensor, Tensor]  # out and lse, as attention returns them

_HOPPER = "flash_fwd_sm90"  # the kernel that hands out partial results


@operator("cascade_attention")
def cascade_attention_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_tables: Sequence[Tensor],
    prefix_lens: Sequence[Tensor],
    prefix_rows: Sequence[Tensor | None],
    prefix_max_rows: Sequence[int],
    suffix_table: Tensor,
    suffix_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None,
    prefix_starts: Sequence[Tensor | None],
    suffix_starts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> State:
    """One entry of the `prefix_*` per level; see `attention_backend.shared_prefix.cascade_attention`."""
    states: list[State] = []
    partials: list[State] = []
    rows, page = q if q.dim() == 3 else q.flatten(0, 1), k_cache.shape[1]
    levels = zip(prefix_tables, prefix_lens, prefix_rows, prefix_max_rows, prefix_starts, strict=True)
    for table, lens, cu_rows, max_rows, starts in levels:
        if table.shape[1] == 0:
            continue
        args = AttentionArgs(
            rows.unsqueeze(0) if cu_rows is None else rows,
            k_cache,
            v_cache,
            softmax_scale,
            cu_seqlens_q=cu_rows,
            max_seqlen_q=0 if cu_rows is None else max_rows,
            max_seqlen_k=table.shape[1] * page,
            seqused_k=lens,
            leftpad_k=starts,
            block_table=table,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        args = with_plain_strides(args)
        if dispatch.select(args).kernel == _HOPPER:
            from attention_backend.kernels import flash_fwd_sm90

            partials.append(flash_fwd_sm90.forward_partials(args))
        else:
            states.append(dispatch.run(args))
    if suffix_table.shape[1] > 0:
        args = AttentionArgs(
            q,
            k_cache,
            v_cache,
            softmax_scale,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=suffix_table.shape[1] * page,
            seqused_k=suffix_lens,
            leftpad_k=suffix_starts,
            block_table=suffix_table,
            window_right=0,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        states.append(dispatch.run(with_plain_strides(args)))
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    lse = q.new_empty(_lse_shape(q), dtype=compute_dtype(q.dtype))
    _merge_into(out, lse, states, partials, sinks)
    return out, lse


def _merge_into(
    out: Tensor, lse: Tensor, states: Sequence[State], partials: Sequence[State], sinks: Tensor | None
) -> None:
    if out.is_cuda:
        from attention_backend.kernels import flash_merge

        flash_merge.merge_states(states, out, lse, partials=partials, sinks=sinks)
    elif states:
        outs, lses = zip(*(_by_rows(*state) for state in states), strict=True)
        merged, merged_lse = merge.merge_states(outs, lses, sinks)
        out.copy_(merged.view(out.shape))
        lse.copy_(merged_lse if lse.dim() == 2 else merged_lse.unflatten(1, out.shape[:2]).transpose(0, 1))
    else:
        out.zero_()
        lse.fill_(-torch.inf)


def _by_rows(out: Tensor, lse: Tensor) -> State:
    """out `[rows, num_heads, dim]`, lse `[num_heads, rows]`, whatever the layout of the pass was."""
    if out.dim() == 3:
        return out, lse
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


@cascade_attention_op.register_fake
def _cascade_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> State:  # noqa: ARG001
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    return out, q.new_empty(_lse_shape(q), dtype=compute_dtype(q.dtype))


@operator("merge_states")
def merge_states_op(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> State:
    """See `attention_backend.shared_prefix.merge_states`."""
    out = outs[0].new_empty(outs[0].shape)
    lse = lses[0].new_empty(lses[0].shape)
    if out.is_cuda:
        _merge_into(out, lse, list(zip(outs, lses, strict=True)), (), sinks)
        return out, lse
    return merge.merge_states(outs, lses, sinks)


@merge_states_op.register_fake
def _merge_states_fake(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> State:  # noqa: ARG001
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)
