"""One layer of an engine step whose sequences share pages: a cascade for the parts of the step that do.

New keys and values are in their pages already. Knows no scheduler and waits for no CUDA device.
"""

from dataclasses import dataclass

from torch import Tensor

from attention_backend import paged_ops
from attention_backend.cascade import cascade_attention_op
from attention_backend.metadata import PagedMetadata, SharedPages
from attention_backend.problem import UNBOUNDED


@dataclass(frozen=True, slots=True)
class Layer:
    """What all rows of the step have in common: caches `[num_blocks, Hkv, block_size, *]` and full causal attention."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    softmax_scale: float
    softcap: float
    sinks: Tensor | None


def paged_cascade(q: Tensor, layer: Layer, step: PagedMetadata) -> Tensor:
    """q `[T, Hq, D]` -> `[T, Hq, Dv]`."""
    decodes = step.num_decodes
    if decodes == step.num_seqs == q.shape[0]:
        return _decodes(q, layer, step)
    out = _prefills(q, layer, step)
    if decodes:
        paged_ops.put_decodes(out, _decodes(q[:decodes], layer, step), step.decodes_here)
    return out


def _decodes(q: Tensor, layer: Layer, step: PagedMetadata) -> Tensor:
    some = slice(0, step.num_decodes)
    lens, table, cu_seqlens = step.seq_lens[some], step.block_table[some], step.cu_seqlens_q[: step.num_decodes + 1]
    if step.shared_decodes is None:
        return _plain(q, layer, step, cu_seqlens, lens, table, step.num_decodes)
    if step.decodes_here is not None:  # those that are not have no row of their own pass, and lie in groups of no keys
        return _cascade(q, layer, step.shared_decodes, lens, table, cu_seqlens, 1)
    return _cascade(q.unsqueeze(1), layer, step.shared_decodes, lens, table, None, 0).squeeze(1)


def _prefills(q: Tensor, layer: Layer, step: PagedMetadata) -> Tensor:
    """`[T, Hq, Dv]`; the decodes' rows in front are undefined."""
    decodes, some = step.num_decodes, slice(step.num_decodes, None)
    cu_seqlens, lens, table = step.cu_seqlens_q[some], step.seq_lens[some], step.block_table[some]
    if decodes == step.num_seqs:  # rows of nobody follow
        return q.new_zeros((*q.shape[:-1], layer.v_cache.shape[-1]))
    if step.shared_prefills is None or layer.k_scale is not None:  # groups over float8 pages are of few rows
        return _plain(q, layer, step, cu_seqlens, lens, table, 0)
    out = q.new_empty((*q.shape[:-1], layer.v_cache.shape[-1]))
    # A decode is one row, so row numbers drop by the number of decodes.
    shared = step.shared_prefills
    out[some] = _cascade(q[some], layer, shared, lens, table, cu_seqlens - decodes, step.max_seqlen_q)
    return out


def _plain(
    q: Tensor, layer: Layer, step: PagedMetadata, cu_seqlens: Tensor, lens: Tensor, table: Tensor, num_decodes: int
) -> Tensor:
    out: Tensor = paged_ops.paged_attention_op(
        q, None, None, layer.k_cache, layer.v_cache, cu_seqlens, lens, table, step.slot_mapping, num_decodes,
        step.max_seqlen_q, step.max_seqlen_k, layer.softmax_scale, UNBOUNDED, 0, layer.softcap, layer.sinks,
        layer.k_scale, layer.v_scale,
    )  # fmt: skip
    return out


def _cascade(
    q: Tensor,
    layer: Layer,
    shared: SharedPages,
    lens: Tensor,
    table: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> Tensor:
    rows, levels = q.shape[0], shared.prefixes  # a decode is a row
    out: Tensor = cascade_attention_op(
        q,
        layer.k_cache.transpose(1, 2),
        layer.v_cache.transpose(1, 2),
        [level.block_table for level in levels],
        [level.lens for level in levels],
        [level.cu_rows for level in levels],
        [level.max_rows or rows for level in levels],
        table,
        lens,
        cu_seqlens,
        max_seqlen,
        layer.softmax_scale,
        layer.softcap,
        layer.sinks,
        [level.starts for level in levels],
        shared.own_starts,
        layer.k_scale,
        layer.v_scale,
    )[0]
    return out
