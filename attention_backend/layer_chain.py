"""What a decoder layer computes between two attentions, as one operator: of few rows, bound by the weights' bytes,
which one kernel streams without a break; where keys are few the attention in front, too. On a CPU the same in plain
torch. No gradients. Knows no model.
"""

import torch
from torch import Tensor

from attention_backend.chain_arguments import (
    ChainOptions,
    ChainWeights,
    NextAttention,
    OwnAttention,
    check_attention,
    check_chain,
    check_own,
)
from attention_backend.chain_operators import layer_chain_op, layer_chain_to_pages_op
from attention_backend.heuristics.layer_chain import MOST_KEYS, MOST_ROWS, ChainHeads
from attention_backend.no_gradients import refuse_gradients

__all__ = [
    "MOST_KEYS",
    "MOST_ROWS",
    "ChainHeads",
    "ChainOptions",
    "ChainWeights",
    "NextAttention",
    "OwnAttention",
    "layer_chain",
    "layer_chain_to_pages",
    "refuses",
]


def layer_chain(
    attended: Tensor,
    residual: Tensor,
    weights: ChainWeights,
    options: ChainOptions,
    *,
    own: OwnAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """(total = sum + gated_mlp(norm_mlp(sum)), norm_next(total) next^T + next_bias), sum = residual + attended out^T.

    attended `[rows, attended_width]`, residual `[rows, width]`, up to MOST_ROWS rows; returns `[rows, width]` and
    `[rows, next_width]`. Rounded where Hugging Face's modules round. Results repeat bitwise.
    In a CUDA graph the weights are read while the kernels in front still run: they are constants there.

    With `own` the first tensor is queries `[rows, heads, head_dim]`, and what they attend to is computed here, too: for
    some thousand keys a row, while weights are on their way.

    Raises UnsupportedError for gradients and, on a GPU, for what `refuses` names and for pages and weights that are not
    16-byte aligned, ValueError for shapes and TypeError for dtypes that do not fit.
    """
    attending = _checked(attended, residual, weights, options, own)
    tensors = _tensors(attended, residual, weights)
    refuse_gradients("layer_chain", *tensors, *attending[:2])
    total, out = layer_chain_op(*tensors, *_numbers(options), *attending)
    return total, out


def layer_chain_to_pages(
    attended: Tensor,
    residual: Tensor,
    weights: ChainWeights,
    options: ChainOptions,
    attention: NextAttention,
    *,
    own: OwnAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """`layer_chain` and `layers.rotary_store` of its products, which are queries, keys and values below each other: the
    keys and values are in their pages then.

    Returns `[rows, width]` and the turned queries `[rows, heads, head_dim]`, rounded as by the two one after the other.
    Raises what they raise.
    """
    attending = _checked(attended, residual, weights, options, own)
    check_attention(residual, weights, attention)
    pages = attention.pages
    store = (pages.k, pages.v, attention.slot_mapping, attention.cos, attention.sin, pages.k_scale, pages.v_scale)
    tensors = _tensors(attended, residual, weights)
    refuse_gradients("layer_chain_to_pages", *tensors, *attending[:2], *store)
    total, queries = layer_chain_to_pages_op(*tensors, *_numbers(options), *attending, attention.num_heads, *store)
    return total, queries


def refuses(
    device: torch.device,
    dtype: torch.dtype,
    *,
    attended_width: int,
    width: int,
    gated_width: int,
    rows: int = 1,
    heads: ChainHeads | None = None,
) -> str | None:
    """Why the kernel does not serve so many rows of these widths there, in words; None: it does. `heads`: with the
    attention in front."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    from attention_backend.kernels import layer_chain as kernel

    return kernel.refuses(device, dtype, attended_width, width, gated_width, rows, heads)


def _tensors(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor | None, ...]:
    return (
        attended, residual, weights.out, weights.norm_mlp, weights.gate_up, weights.down, weights.norm_next,
        weights.next, weights.next_bias,
    )  # fmt: skip


def _checked(
    attended: Tensor, residual: Tensor, weights: ChainWeights, options: ChainOptions, own: OwnAttention | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
    """The operators' arguments for the attention in front."""
    if own is None:
        check_chain(attended, residual, weights, options)
        return None, None, None, None, 0.0
    check_own(attended, own)
    check_chain(attended.flatten(1), residual, weights, options)
    return own.pages.k, own.pages.v, own.block_table, own.seq_lens, own.softmax_scale


def _numbers(options: ChainOptions) -> tuple[str, float, float, bool]:
    return options.activation, options.eps_mlp, options.eps_next, options.unit_offset
