"""The operators of `attention_backend.layer_chain`. Arguments are flat because a schema is, and were checked before."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import dispatch
from attention_backend.layers import rotary_store_op
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs
from attention_backend.reference import layers as reference

if TYPE_CHECKING:
    from attention_backend.kernels.chain_attention import Attending


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
    own_k: Tensor | None,
    own_v: Tensor | None,
    block_table: Tensor | None,
    seq_lens: Tensor | None,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """See `layer_chain`."""
    if attended.is_cuda:
        from attention_backend.kernels import layer_chain as kernel

        return kernel.layer_chain(
            attended, residual, out_weight, norm_mlp, gate_up, down, norm_next, next_weight, next_bias, activation,
            eps_mlp, eps_next, unit_offset=unit_offset, early=torch.cuda.is_current_stream_capturing(),
            attending=_attending(own_k, own_v, block_table, seq_lens, softmax_scale),
        )  # fmt: skip
    if own_k is not None and own_v is not None:
        attended = _attend(attended, own_k, own_v, block_table, seq_lens, softmax_scale)
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
    own_k: Tensor | None,
    own_v: Tensor | None,
    block_table: Tensor | None,
    seq_lens: Tensor | None,
    softmax_scale: float,
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
            attending=_attending(own_k, own_v, block_table, seq_lens, softmax_scale),
        )  # fmt: skip
    total, products = layer_chain_op(
        attended, residual, out_weight, norm_mlp, gate_up, down, norm_next, next_weight, next_bias, activation,
        eps_mlp, eps_next, unit_offset, own_k, own_v, block_table, seq_lens, softmax_scale,
    )  # fmt: skip
    heads = products.unflatten(1, (-1, k_cache.shape[3]))
    q, k, v = heads.split((num_heads, k_cache.shape[1], k_cache.shape[1]), dim=1)
    return total, rotary_store_op(
        q, k, v, k_cache, v_cache, slot_mapping, cos, sin, None, None, 0.0, False, k_scale, v_scale
    )


@layer_chain_to_pages_op.register_fake
def _layer_chain_to_pages_fake(attended: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    num_heads, k_cache = others[16], others[17]
    queries = residual.new_empty(residual.shape[0], num_heads, k_cache.shape[3])
    return residual.new_empty(residual.shape), queries


def _attending(
    k: Tensor | None, v: Tensor | None, block_table: Tensor | None, seq_lens: Tensor | None, softmax_scale: float
) -> "Attending | None":
    """As the kernel wants it."""
    from attention_backend.kernels.chain_attention import Attending

    if k is None or v is None or block_table is None or seq_lens is None:
        return None
    dispatch.count("layer_chain_sm90")
    return Attending(k, v, block_table, seq_lens, softmax_scale)


def _attend(
    queries: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, seq_lens: Tensor | None, softmax_scale: float
) -> Tensor:
    """`[rows, heads, head_dim]` -> `[rows, heads * head_dim]`"""
    args = AttentionArgs(
        queries.unsqueeze(1), k.transpose(1, 2), v.transpose(1, 2), softmax_scale,
        max_seqlen_k=0 if block_table is None else block_table.shape[1] * k.shape[2],
        seqused_k=seq_lens, block_table=block_table, window_right=0,
    )  # fmt: skip
    return dispatch.run(args)[0].flatten(1)
