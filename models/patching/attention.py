"""The attention function of the name "longwave": a Hugging Face call becomes an `AttentionArgs`, and nothing is copied.

Knows transformers' calling convention; knows no model family and no kernel.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import attention_backend
from attention_backend.interface import dropout_seed
from attention_backend.problem import UNBOUNDED, AttentionArgs
from models.patching.descriptor import Descriptor, decode, hides_keys, is_descriptor, sequence_rows
from models.patching.errors import UnsupportedCallError
from models.patching.keywords import refuse_unknown
from models.patching.layout import tokens_first

#: The largest position bias (T5) served: 2^29 elements, 1 GiB of bf16. The model writes it out itself, N x N a head.
MAX_BIAS_ELEMENTS = 2**29


def longwave_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query `[batch, heads, q, head_dim]`, key and value `[batch, kv_heads, k, *]` -> `[batch, q, heads, head_dim_v]`.

    The mask tells what is visible; `is_causal` and `sliding_window` count only where no mask was made (vision towers).
    Dropout acts in training only, in steps of 1/256 (`AttentionArgs`), and draws its seed from torch's generator.
    Raises UnsupportedCallError for what would not be computed exactly.
    """
    refuse_unknown(module, keywords)
    # Some families hand their dropout over outside training too, where it is the identity.
    dropout_p = dropout if module.training else 0.0
    args = AttentionArgs(
        q=tokens_first(query),
        k=tokens_first(key),
        v=tokens_first(value),
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        bias=None if position_bias is None else _checked_bias(position_bias),
        dropout_p=dropout_p,
        dropout_seed=dropout_seed(dropout_p, query),
    )
    mask = None
    if attention_mask is not None and is_descriptor(attention_mask):
        mask = decode(attention_mask, query.shape[0], query.shape[2], key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if attention_mask is not None and mask is None:
            raise UnsupportedCallError("cu_seq_lens together with a written-out attention mask")
        if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise UnsupportedCallError("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k must come together")
        args = _with_cu_seqlens(args, cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k))
        args = _with_flags(args, module, is_causal, sliding_window) if mask is None else _with_packed_rule(args, mask)
    elif attention_mask is None:
        args = _with_flags(args, module, is_causal, sliding_window)
    elif mask is None:
        args = _with_written_mask(args, attention_mask)
    elif mask.cu_seqlens is not None:
        args = _with_cu_seqlens(args, mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
        args = replace(args, mask_desc=mask.desc)
    else:
        args = replace(args, mask_desc=mask.desc, key_mask=mask.key_mask)
    out = attention_backend.attention(args)
    return out.view(query.shape[0], query.shape[2], *out.shape[-2:]), None


def _with_cu_seqlens(args: AttentionArgs, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> AttentionArgs:
    """Rows become one run of tokens: `[batch, tokens, heads, dim]` -> `[batch * tokens, heads, dim]`, a view."""
    if args.bias is not None:
        raise UnsupportedCallError("position_bias together with packed sequences")
    return replace(
        args,
        q=args.q.flatten(0, 1),
        k=args.k.flatten(0, 1),
        v=args.v.flatten(0, 1),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
    )


def _with_packed_rule(args: AttentionArgs, mask: Descriptor) -> AttentionArgs:
    """`cu_seq_lens` says where sequences lie, the mask says how far a query sees inside one."""
    if mask.key_mask is not None or (mask.cu_seqlens is None and hides_keys(mask.desc)):
        raise UnsupportedCallError(
            "cu_seq_lens together with a 2-D attention mask: packed sequences have no padding, leave the mask out"
        )
    assert args.cu_seqlens_q is not None
    assert args.cu_seqlens_k is not None
    return replace(args, mask_desc=sequence_rows(mask.desc, args.cu_seqlens_q, args.cu_seqlens_k))


def _with_flags(
    args: AttentionArgs, module: nn.Module, is_causal: bool | None, sliding_window: int | None
) -> AttentionArgs:
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if sliding_window is None:
        return replace(args, window_right=0 if causal else UNBOUNDED)
    if not causal:
        raise UnsupportedCallError(f"{type(module).__name__} passes a bidirectional sliding window without a mask")
    return replace(args, window_left=sliding_window - 1, window_right=0)


def _with_written_mask(args: AttentionArgs, mask: Tensor) -> AttentionArgs:
    """A 4-D mask that the caller wrote out, boolean (True = visible) or additive: it says everything, causality too."""
    known = mask.dtype == torch.bool or mask.is_floating_point()
    if not known or mask.dim() != 4 or mask.shape[-1] < args.k.shape[1]:
        raise UnsupportedCallError(
            "an attention mask must be ours, boolean or additive, [batch, 1, q, k]; "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    mask = mask[..., : args.k.shape[1]]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=args.q.dtype).masked_fill(~mask, float("-inf"))
    return replace(args, bias=mask if args.bias is None else args.bias + mask)


def _checked_bias(bias: Tensor) -> Tensor:
    if bias.numel() > MAX_BIAS_ELEMENTS:
        raise UnsupportedCallError(
            f"a position bias of shape {tuple(bias.shape)} has more than {MAX_BIAS_ELEMENTS} elements: "
            "this family writes one out for every pair of positions, so it is served for shorter inputs only"
        )
    return bias
