"""The public functions for requests that share pages: attention whose shared keys are read once, and merging of states.

After cascade inference in FlashInfer (Ye et al., 2024): a softmax over disjoint parts of the keys is the merge of the
parts' softmaxes, so the rows of all requests go over the shared pages together. Forward only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend import cascade
from attention_backend.checks import (
    check_args,
    check_int,
    check_is_tensor,
    check_sinks,
    check_tensor,
    check_window_size,
)
from attention_backend.errors import UnsupportedError
from attention_backend.host_checks import check_pages, check_starts, check_varlen
from attention_backend.interface import Window, default_scale
from attention_backend.no_gradients import refuse_gradients
from attention_backend.problem import UNBOUNDED, AttentionArgs
from attention_backend.reference.tiles import compute_dtype

#: Levels of prefixes within prefixes; a GPU merges them all in one launch.
MAX_LEVELS = 6


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroups:
    """One level of sharing: the query rows `cu_rows[g]` to `cu_rows[g + 1]` share the keys `starts[g]` (or 0) to
    `lens[g]` of the pages `block_table[g]`.

    Rows are counted over all requests in their order, and every row is in exactly one group: requests that share
    nothing make a group of length 0. Without `cu_rows` there is one group, of all rows.
    """

    block_table: Tensor  # int32 [groups, max_pages]; entries past a group's length are not followed
    lens: Tensor  # int32 [groups]
    cu_rows: Tensor | None = None  # int32 [groups + 1]
    max_rows: int = 0  # rows of the largest group (an upper bound is allowed); 0: all rows
    starts: Tensor | None = None  # int32 [groups]: keys before it belong to other levels


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_block_table: Tensor,
    prefix_len: int | Tensor,
    suffix_block_table: Tensor,
    suffix_lens: Tensor,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Requests that all begin with the same `prefix_len` keys, q `[requests, rows, num_heads, head_dim]`.

    prefix_block_table int32 `[pages]`, prefix_len a number or int32 `[1]` on q's device (which is not read back).
    Otherwise as `cascade_attention`.
    """
    check_is_tensor("q", q)
    check_is_tensor("k_cache", k_cache)
    check_tensor("prefix_block_table", prefix_block_table, torch.int32, (None,), q.device)
    if not isinstance(prefix_len, Tensor):
        check_int("prefix_len, where it is not a tensor,", prefix_len)
        capacity = prefix_block_table.shape[0] * k_cache.shape[1]
        if not 0 <= prefix_len <= capacity:
            raise ValueError(f"prefix_len must be from 0 to {capacity}, what the pages hold, got {prefix_len}")
        prefix_len = torch.full((1,), prefix_len, dtype=torch.int32, device=q.device)
    return cascade_attention(
        q,
        k_cache,
        v_cache,
        [PrefixGroups(prefix_block_table.unsqueeze(0), prefix_len)],
        suffix_block_table=suffix_block_table,
        suffix_lens=suffix_lens,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
    )


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefixes: Sequence[PrefixGroups],
    *,
    suffix_block_table: Tensor,
    suffix_lens: Tensor,
    suffix_starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of requests whose keys are, one after the other, a shared run of each level of `prefixes` and a suffix
    of their own: the same result as over the joined keys, with shared pages read once a group.

    q `[requests, rows, num_heads, head_dim]`, or `[total_q, num_heads, head_dim]` with `cu_seqlens_q` and
    `max_seqlen_q`; caches `[num_blocks, page_size, num_kv_heads, *]` (any strides: the engine's pool fits as a
    transposed view); suffix_block_table int32 `[requests, max_pages]`, suffix_lens int32 `[requests]`. With
    `suffix_starts` int32 `[requests]` a request's own keys are those from there to `suffix_lens` of its table: so one
    block table of all its keys serves every pass. Float8 caches come with scales, as in flash_attn_with_kvcache.

    A request's n rows are its last: row t sees all of its prefixes, and of its suffix the keys up to
    `suffix_lens - n + t`. Returns out like q, or (out, lse) with lse `[requests, num_heads, rows]` or
    `[num_heads, total_q]`. A sink joins once. Waits for no device: lengths and tables may change under a CUDA graph.

    Raises ValueError and TypeError for arguments that make no problem, and UnsupportedError for windows, for gradients
    and for what no kernel serves.
    """
    check_window_size(window_size)
    if tuple(window_size) != (UNBOUNDED, UNBOUNDED):
        raise UnsupportedError(
            f"window_size={window_size} is not served: with a window, rows do not share what they see of a prefix. "
            "Shared-prefix attention is causal over all keys; for windows call flash_attn_with_kvcache"
        )
    refuse_gradients("shared-prefix attention", q, k_cache, v_cache, sinks, k_scale, v_scale)
    check_is_tensor("suffix_block_table", suffix_block_table)
    check_is_tensor("suffix_lens", suffix_lens)
    scale = default_scale(softmax_scale, q)
    suffixes = AttentionArgs(
        q,
        k_cache,
        v_cache,
        scale,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=suffix_lens,
        leftpad_k=suffix_starts,
        block_table=suffix_block_table,
        sinks=sinks,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check_args(suffixes)
    rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    _check_prefixes(prefixes, rows, k_cache)
    check_varlen(suffixes)
    check_pages("suffix_block_table", suffix_block_table, "suffix_lens", suffix_lens, k_cache)
    out, lse = cascade.cascade_attention_op(
        q,
        k_cache,
        v_cache,
        [level.block_table for level in prefixes],
        [level.lens for level in prefixes],
        [level.cu_rows for level in prefixes],
        [level.max_rows or rows for level in prefixes],
        suffix_block_table,
        suffix_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale,
        softcap,
        sinks,
        [level.starts for level in prefixes],
        suffix_starts,
        k_scale,
        v_scale,
    )
    return (out, lse) if return_lse else out


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each: (out, lse).

    FlashInfer's merge_states, in the layout of our functions: outs `[rows, num_heads, head_dim]` with lses
    `[num_heads, rows]`, or outs `[batch, rows, num_heads, head_dim]` with lses `[batch, num_heads, rows]`; natural
    logarithms, float32 (float64 with float64 outs). A state with lse -inf has seen nothing, and its out may hold
    anything. sinks `[num_heads]` join the denominator, and must not be in the states already.

    Raises UnsupportedError under autograd, and on a GPU for rows that are not a multiple of 8 elements up to 256.
    """
    for name, states in (("outs", outs), ("lses", lses)):
        if isinstance(states, Tensor):
            raise TypeError(f"{name} must be a sequence of tensors, one a state: pass {name}.unbind() of stacked ones")
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_states needs an lse for each out, and one state at least: {len(outs)}, {len(lses)}")
    check_is_tensor("outs[0]", outs[0])
    first, device = outs[0], outs[0].device
    if first.dim() not in (3, 4):
        raise ValueError(f"an out must be [rows, heads, dim] or [batch, rows, heads, dim], got {tuple(first.shape)}")
    if not first.dtype.is_floating_point:
        raise TypeError(f"outs must be floating point, got {first.dtype}")
    lse_shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for at, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(f"outs[{at}]", out, first.dtype, tuple(first.shape), device)
        check_tensor(f"lses[{at}]", lse, compute_dtype(first.dtype), lse_shape, device)
    if sinks is not None:
        check_sinks(sinks, first.shape[-2], device)
    refuse_gradients("merge_states", *outs, *lses, sinks)
    out, lse = cascade.merge_states_op(list(outs), list(lses), sinks)
    return out, lse


def _check_prefixes(prefixes: Sequence[PrefixGroups], rows: int, k_cache: Tensor) -> None:
    device = k_cache.device
    if len(prefixes) > MAX_LEVELS:
        raise UnsupportedError(f"{len(prefixes)} levels of prefixes: at most {MAX_LEVELS} are served")
    for level in prefixes:
        check_tensor("the block_table of a prefix", level.block_table, torch.int32, (None, None), device)
        groups = level.block_table.shape[0]
        check_tensor("the lens of a prefix", level.lens, torch.int32, (groups,), device)
        if level.starts is not None:
            check_tensor("the starts of a prefix", level.starts, torch.int32, (groups,), device)
        if level.max_rows < 0:
            raise ValueError(f"max_rows must be at least 0, got {level.max_rows}")
        if level.cu_rows is not None:
            check_tensor("the cu_rows of a prefix", level.cu_rows, torch.int32, (groups + 1,), device)
            check_starts("the cu_rows of a prefix", level.cu_rows, rows, "max_rows", level.max_rows or rows)
        elif groups != 1:
            raise ValueError(f"{groups} groups of requests need cu_rows: which rows are whose")
        check_pages("the block_table of a prefix", level.block_table, "the lens of a prefix", level.lens, k_cache)
