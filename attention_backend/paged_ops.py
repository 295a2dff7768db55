"""Pages as torch.library operators: how keys and values come into them, and attention over them.

Arguments are flat because a schema is; they were checked by the public functions and are not checked again.
"""

from typing import Any

import torch
from torch import Tensor

from attention_backend import dispatch, fp8_pages
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs
from attention_backend.reference import kv_cache, rotary

_CACHES = ("k_cache", "v_cache")


def _store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """k, v `[T, Hkv, *]` into caches `[num_blocks, Hkv, block_size, *]`; see reference.kv_cache.store."""
    if k.device.type == "cuda":
        from attention_backend.kernels import kv_cache_store

        kv_cache_store.store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    else:
        kv_cache.store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


store_kv_op = operator("store_kv", mutates_args=_CACHES)(_store_kv)


@store_kv_op.register_fake
def _store_kv_fake(*tensors: Tensor | None) -> None:
    del tensors


@operator("rotate_and_store", mutates_args=_CACHES)
def rotate_and_store_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Stores rotated keys, and returns rotated queries; see kernels.kv_cache_store.rotate_and_store."""
    if k.device.type == "cuda":
        from attention_backend.kernels import kv_cache_store

        return kv_cache_store.rotate_and_store(
            q, k, v, k_cache, v_cache, slot_mapping, q_positions, k_positions, cos, sin, interleaved, k_scale, v_scale
        )
    turned = rotary.apply(k, cos, sin, k_positions, interleaved)
    kv_cache.store(turned, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return rotary.apply(q, cos, sin, q_positions, interleaved)


@rotate_and_store_op.register_fake
def _rotate_and_store_fake(q: Tensor, *others: Any) -> Tensor:  # noqa: ARG001
    return q.new_empty(q.shape)


@operator("paged_attention", mutates_args=_CACHES)
def paged_attention_op(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    num_decodes: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    chunk_size: int,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    decodes_here: Tensor | None = None,
) -> Tensor:
    """See `attention_backend.paged_attention`."""
    if k_new is not None and v_new is not None:
        _store_kv(k_new, v_new, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    num_seqs, k, v = seq_lens.shape[0], k_cache.transpose(1, 2), v_cache.transpose(1, 2)

    def problem(rows: Tensor, sequences: slice, cu_seqlens: Tensor | None, max_rows: int) -> AttentionArgs:
        return AttentionArgs(
            rows,
            k,
            v,
            softmax_scale,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max_rows,
            max_seqlen_k=max_seqlen_k,
            seqused_k=seq_lens[sequences],
            block_table=block_table[sequences],
            sinks=sinks,
            window_left=window_left,
            window_right=0,
            chunk_size=chunk_size,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def attend(args: AttentionArgs) -> Tensor:
        return dispatch.run(args)[0] if k_scale is None else fp8_pages.attention(args)

    if num_decodes == 0:
        return attend(problem(q, slice(None), cu_seqlens_q, max_seqlen_q))
    first = slice(0, num_decodes)
    if decodes_here is None:
        few = problem(q[first].unsqueeze(1), first, None, 1)
    else:  # those that are not have no row
        few = problem(q[first], first, cu_seqlens_q[: num_decodes + 1], 1)
    if num_decodes == num_seqs:
        decodes = attend(few).view(num_decodes, *q.shape[1:-1], -1)
        if num_decodes == q.shape[0]:
            return decodes
        out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))  # rows of nobody follow
    else:  # in place: the first of the others' rows is where their lengths begin
        many = problem(q, slice(num_decodes, None), cu_seqlens_q[num_decodes:], max_seqlen_q)
        if k_scale is None:
            (decodes, _), (out, _) = dispatch.run_both(few, many)
        else:
            decodes, out = attend(few), attend(many)
        decodes = decodes.view(num_decodes, *out.shape[1:])
    put_decodes(out, decodes, decodes_here)
    return out


def put_decodes(out: Tensor, decodes: Tensor, here: Tensor | None) -> None:
    """Writes the decodes' rows to the front of `out`, but for those that are not: others' rows may stand there."""
    front = out[: decodes.shape[0]]
    if here is None:
        front.copy_(decodes)
    else:
        torch.where(here, decodes, front, out=front)


@paged_attention_op.register_fake
def _paged_attention_fake(
    q: Tensor,
    k_new: Tensor | None,  # noqa: ARG001
    v_new: Tensor | None,  # noqa: ARG001
    k_cache: Tensor,  # noqa: ARG001
    v_cache: Tensor,
    *options: Any,  # noqa: ARG001
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
