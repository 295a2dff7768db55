"""The public functions on keys handed in whole: FlashAttention's two, and the general door. One operator each.

FlashAttention 2.x: argument order, layouts, defaults and semantics (causal is bottom-right, ALiBi is two-sided).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_backend import ops
from attention_backend.checks import (
    check_args,
    check_differentiable,
    check_is_tensor,
    check_number,
    check_tensor,
    check_window_size,
)
from attention_backend.host_checks import check_pages, check_varlen
from attention_backend.problem import AttentionArgs

Window = tuple[int, int]
#: out, or (out, lse, S_dmask) with S_dmask always None: FlashAttention fills it for its own tests only.
FlashResult = Tensor | tuple[Tensor, Tensor, None]


def attention(args: AttentionArgs) -> Tensor:
    """Attention as `AttentionArgs` describes it: `args.out_shape`. Differentiable once in q, k, v, bias and sinks.

    Raises ValueError and TypeError for arguments that make no problem, UnsupportedError for one that nothing serves and
    where autograd would ask for a gradient of anything else.
    """
    return attention_with_lse(args)[0]


def attention_with_lse(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """As `attention`, with the log of every row's softmax denominator, `args.lse_shape`."""
    check_args(args)
    check_varlen(args)
    if args.block_table is not None and args.seqused_k is not None:
        check_pages("block_table", args.block_table, "the number of keys", args.seqused_k, args.k)
    return checked_attention(args)


def checked_attention(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """`attention_with_lse` of a problem that `check_args` has passed."""
    if args.q.device.type == "cuda":
        args = with_plain_strides(args)
    out, lse = ops.attention_op(
        args.q, args.k, args.v, args.softmax_scale, args.cu_seqlens_q, args.cu_seqlens_k, args.max_seqlen_q,
        args.max_seqlen_k, args.seqused_k, args.leftpad_k, args.block_table, args.mask_desc, args.key_mask, args.bias,
        args.alibi_slopes, args.sinks, args.window_left, args.window_right, args.chunk_size, args.softcap,
        args.num_splits, args.dropout_p, args.dropout_seed, args.k_scale, args.v_scale, args.deterministic,
    )  # fmt: skip
    return out, lse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    chunk_size: int = 0,
) -> FlashResult:
    """q `[batch, seqlen_q, num_heads, head_dim]`, k, v `[batch, seqlen_k, num_kv_heads, *]` -> out shaped like q.

    The forward gives the same bits each time; with `deterministic` (or torch.use_deterministic_algorithms) gradients do
    too. With `dropout_p` that holds after the same torch.manual_seed: see `dropout_seed`.
    """
    window_left, window_right = window_bounds(causal, window_size)
    out, lse = attention_with_lse(
        AttentionArgs(
            q,
            k,
            v,
            default_scale(softmax_scale, q),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            window_left=window_left,
            window_right=window_right,
            chunk_size=chunk_size,
            softcap=softcap,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed(dropout_p, q),
            deterministic=deterministic,
        )
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    chunk_size: int = 0,
) -> FlashResult:
    """q `[total_q, num_heads, head_dim]`, k, v `[total_k, num_kv_heads, *]`, cu_seqlens int32 `[batch + 1]`.

    With `block_table` k and v are pages `[num_blocks, page_size, num_kv_heads, *]` and cu_seqlens_k tells lengths only.
    lse is `[num_heads, total_q]`.
    """
    if block_table is not None:
        check_is_tensor("q", q)
        check_is_tensor("cu_seqlens_q", cu_seqlens_q)
        check_tensor("cu_seqlens_k", cu_seqlens_k, torch.int32, tuple(cu_seqlens_q.shape), q.device)
    window_left, window_right = window_bounds(causal, window_size)
    out, lse = attention_with_lse(
        AttentionArgs(
            q,
            k,
            v,
            default_scale(softmax_scale, q),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k if block_table is None else None,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_k=None if block_table is None else cu_seqlens_k[1:] - cu_seqlens_k[:-1],
            block_table=block_table,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            window_left=window_left,
            window_right=window_right,
            chunk_size=chunk_size,
            softcap=softcap,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed(dropout_p, q),
            deterministic=deterministic,
        )
    )
    return (out, lse, None) if return_attn_probs else out


#: Read by kernels as arrays; and as rows, whatever lies between them.
_ARRAYS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "leftpad_k",
    "mask_desc",
    "sinks",
    "dropout_seed",
    "k_scale",
    "v_scale",
)
_ROWS = ("block_table", "key_mask", "bias", "alibi_slopes")


def with_plain_strides(args: AttentionArgs) -> AttentionArgs:
    """Lengths, masks and biases as kernels read them, copied where they are not: slices of a table, expanded lengths,
    T5's position bias (heads last in memory)."""
    copies: dict[str, Any] = {}
    for name in (*_ARRAYS, *_ROWS):
        x: Tensor | None = getattr(args, name)
        if x is None:
            continue
        plain = x.is_contiguous() if name in _ARRAYS else x.shape[-1] <= 1 or x.stride(-1) == 1
        if not plain:
            copies[name] = x.contiguous()
    return replace(args, **copies) if copies else args


def default_scale(softmax_scale: float | None, q: Tensor) -> float:
    check_is_tensor("q", q)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
        check_differentiable("softmax_scale", softmax_scale)
        return float(softmax_scale)
    if q.shape[-1] == 0:
        raise ValueError(f"head_dim must be at least 1, got q of shape {tuple(q.shape)}")
    return float(q.shape[-1]) ** -0.5


def window_bounds(causal: bool, window_size: Window) -> tuple[int, int]:
    """(window_left, window_right). Raises TypeError for what is no window size."""
    check_window_size(window_size)
    left, right = window_size
    return left, 0 if causal else right


def dropout_seed(dropout_p: float, q: Tensor) -> Tensor | None:
    """int64 `[2]`, drawn by torch's generator of q's device without waiting for it.

    Inside a CUDA graph too: torch advances the generators of captured graphs, so every replay drops others.
    """
    if not dropout_p:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=q.device)
