"""What a decoder layer computes between two attentions, as one operator: of few rows, bound by the weights' bytes,
which one kernel streams without a break. On a CPU the same in plain torch. No gradients. Knows no model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend.chain_arguments import ChainOptions, ChainWeights, NextAttention, check_attention, check_chain
from attention_backend.heuristics.layer_chain import MOST_ROWS
from attention_backend.layers import rotary_store_op
from attention_backend.no_gradients import refuse_gradients
from attention_backend.operators import operator
from attention_backend.reference import layers as reference

__all__ = [
    "MOST_ROWS",
    "ChainOptions",
    "ChainWeights",
    "NextAttention",
    "layer_chain",
    "layer_chain_to_pages",
    "refuses",
]


def layer_chain(
    attended: Tensor, residual: Tensor, weights: ChainWeights, options: ChainOptions
) -> tuple[Tensor, Tensor]:
    """(total = sum + gated_mlp(norm_mlp(sum)), norm_next(total) next^T + next_bias), sum = residual + attended out^T.

    attended `[rows, attended_width]`, residual `[rows, width]`, up to MOST_ROWS rows; returns `[rows, width]` and
    `[rows, next_width]`. Rounded where Hugging Face's modules round. Results repeat bitwise.
    In a CUDA graph the weights are read while the kernels in front still run: they are constants there.

    Raises UnsupportedError for gradients and, on a GPU, for what `refuses` names, ValueError for shapes that do not
    fit.
    """
    check_chain(attended, residual, weights, options)
    tensors = _tensors(attended, residual, weights)
    refuse_gradients("layer_chain", *tensors)
    total, out = layer_chain_op(*tensors, *_numbers(options))
    return total, out


def layer_chain_to_pages(
    attended: Tensor, residual: Tensor, weights: ChainWeights, options: ChainOptions, attention: NextAttention
) -> tuple[Tensor, Tensor]:
    """`layer_chain` and `layers.rotary_store` of its products, which are queries, keys and values below each other: the
    keys and values are in their pages then.

    Returns `[rows, width]` and the turned queries `[rows, heads, head_dim]`, rounded as by the two one after the other.
    Raises what they raise.
    """
    check_chain(attended, residual, weights, options)
    pages = attention.pages
    rest = (attention.slot_mapping, attention.cos, attention.sin)
    check_attention(attended, weights, attention)
    tensors = _tensors(attended, residual, weights)
    refuse_gradients("layer_chain_to_pages", *tensors, pages.k, pages.v, *rest[1:], pages.k_scale, pages.v_scale)
    total, queries = layer_chain_to_pages_op(
        *tensors, *_numbers(options), attention.num_heads, pages.k, pages.v, *rest, pages.k_scale, pages.v_scale
    )
    return total, queries


def refuses(
    device: torch.device, dtype: torch.dtype, *, attended_width: int, width: int, gated_width: int, rows: int = 1
) -> str | None:
    """Why the kernel does not serve so many rows of these widths there, in words; None: it does."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    from attention_backend.kernels import layer_chain as kernel

    return kernel.refuses(device, dtype, attended_width, width, gated_width, rows)


@operator("layer_chain")
def layer_chain_op(
    attended: Tensor,
    residual: Tensor,
    out_weight: Tensor,
    norm_mlp: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_next: Tensor,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str,
    eps_mlp: float,
    eps_next: float,
    unit_offset: bool,
) -> tuple[Tensor, Tensor]:
    """See `layer_chain`."""
    if attended.is_cuda:
        from attention_backend.kernels import layer_chain as kernel

        return kernel.layer_chain(
            attended, residual, out_weight, norm_mlp, gate_up, down, norm_next, next_weight, next_bias, activation,
            eps_mlp, eps_next, unit_offset=unit_offset, early=torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip
    total = residual + F.linear(attended, out_weight)
    gate, up = F.linear(reference.rms_norm(total, norm_mlp, eps_mlp, unit_offset), gate_up).chunk(2, dim=1)
    total = total + F.linear(reference.gated_activation(gate, up, activation), down)
    return total, F.linear(reference.rms_norm(total, norm_next, eps_next, unit_offset), next_weight, next_bias)


@layer_chain_op.register_fake
def _layer_chain_fake(attended: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    next_weight: Tensor = others[5]
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape[0], next_weight.shape[0])


@operator("layer_chain_to_pages", mutates_args=("k_cache", "v_cache"))
def layer_chain_to_pages_op(
    attended: Tensor,
    residual: Tensor,
    out_weight: Tensor,
    norm_mlp: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_next: Tensor,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str,
    eps_mlp: float,
    eps_next: float,
    unit_offset: bool,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `layer_chain_to_pages`."""
    if attended.is_cuda:
        from attention_backend.kernels import layer_chain as kernel
        from attention_backend.kernels.chain_store import Pages

        return kernel.layer_chain(
            attended, residual, out_weight, norm_mlp, gate_up, down, norm_next, next_weight, next_bias, activation,
            eps_mlp, eps_next, unit_offset=unit_offset, early=torch.cuda.is_current_stream_capturing(),
            pages=Pages(num_heads, k_cache, v_cache, slot_mapping, cos, sin, k_scale, v_scale),
        )  # fmt: skip
    total, products = layer_chain_op(
        attended, residual, out_weight, norm_mlp, gate_up, down, norm_next, next_weight, next_bias, activation,
        eps_mlp, eps_next, unit_offset,
    )  # fmt: skip
    heads = products.unflatten(1, (-1, k_cache.shape[3]))
    q, k, v = heads.split((num_heads, k_cache.shape[1], k_cache.shape[1]), dim=1)
    return total, rotary_store_op(
        q, k, v, k_cache, v_cache, slot_mapping, cos, sin, None, None, 0.0, False, k_scale, v_scale
    )


@layer_chain_to_pages_op.register_fake
def _layer_chain_to_pages_fake(attended: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    num_heads, k_cache = others[11], others[12]
    queries = residual.new_empty(residual.shape[0], num_heads, k_cache.shape[3])
    return residual.new_empty(residual.shape), queries


def _tensors(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor | None, ...]:
    return (
        attended, residual, weights.out, weights.norm_mlp, weights.gate_up, weights.down, weights.norm_next,
        weights.next, weights.next_bias,
    )  # fmt: skip


def _numbers(options: ChainOptions) -> tuple[str, float, float, bool]:
    return options.activation, options.eps_mlp, options.eps_next, options.unit_offset
