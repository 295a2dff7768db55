"""What `attention_backend.layer_chain` takes, and whether it fits together. Knows no kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.checks import check_factors, check_tensor
from attention_backend.heuristics.layer_chain import MOST_ROWS
from attention_backend.layers import ACTIVATIONS
from attention_backend.metadata import KVPages
from attention_backend.page_checks import check_pages, check_rotary_store


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Of an attention's output, the layer's gated MLP and what follows: the next layer's projections, or a head."""

    out: Tensor  # [width, attended_width]
    norm_mlp: Tensor  # [width]
    gate_up: Tensor  # [2 * gated_width, width]: the gate's rows, then the others
    down: Tensor  # [width, gated_width]
    norm_next: Tensor  # [width]
    next: Tensor  # [next_width, width]
    next_bias: Tensor | None = None  # [next_width]


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """What else decides about the results."""

    activation: str  # of attention_backend.layers.ACTIVATIONS
    eps_mlp: float
    eps_next: float
    unit_offset: bool = False  # norms are times 1 + weight


@dataclass(frozen=True, slots=True)
class NextAttention:
    """What `layers.rotary_store` wants beside the queries, keys and values that the next projections give."""

    num_heads: int
    pages: KVPages
    slot_mapping: Tensor  # int64 [rows]
    cos: Tensor  # float32 [rows, rotary_dim / 2]
    sin: Tensor


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """The attention in front of a chain: one query row a sequence against all keys in its pages, its own too."""

    pages: KVPages  # of the rows' dtype
    block_table: Tensor  # int32 [rows, max_blocks]
    seq_lens: Tensor  # int32 [rows]
    softmax_scale: float


def check_chain(attended: Tensor, residual: Tensor, weights: ChainWeights, options: ChainOptions) -> None:
    """Raises ValueError for an activation that there is not, and for shapes or dtypes that do not fit."""
    if options.activation not in ACTIVATIONS:
        raise ValueError(f"activation {options.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if attended.dim() != 2 or residual.dim() != 2 or not 0 < attended.shape[0] <= MOST_ROWS:
        raise ValueError(f"attended and residual must be [rows, ...] of 1 to {MOST_ROWS} rows, got {attended.shape}")
    (rows, attended_width), width = attended.shape, residual.shape[1]
    gated_width, next_width = weights.down.shape[-1], weights.next.shape[0]
    expected = {
        "residual": (residual, (rows, width)),
        "out": (weights.out, (width, attended_width)),
        "norm_mlp": (weights.norm_mlp, (width,)),
        "gate_up": (weights.gate_up, (2 * gated_width, width)),
        "down": (weights.down, (width, gated_width)),
        "norm_next": (weights.norm_next, (width,)),
        "next": (weights.next, (next_width, width)),
    }
    if weights.next_bias is not None:
        expected["next_bias"] = (weights.next_bias, (next_width,))
    for name, (x, shape) in expected.items():
        if x.shape != shape or x.dtype != attended.dtype:
            raise ValueError(f"{name} must be {attended.dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")


def check_attention(attended: Tensor, weights: ChainWeights, attention: NextAttention) -> None:
    """The same of what `layer_chain_to_pages` takes besides; TypeError for dtypes of pages and tables."""
    pages = attention.pages
    if pages.k.dim() != 4:
        raise ValueError(
            f"k_cache must be [num_blocks, num_kv_heads, block_size, head_dim], got {tuple(pages.k.shape)}"
        )
    (_, num_kv_heads, _, head_dim), rows = pages.k.shape, attended.shape[0]
    if weights.next.shape[0] != (attention.num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"next must have {attention.num_heads} + 2 * {num_kv_heads} heads of {head_dim} rows, "
            f"got {weights.next.shape[0]}"
        )
    one = attended.new_empty(1)  # of the products' dtype and device, as they will be
    q, k = (one.expand(rows, heads, head_dim) for heads in (attention.num_heads, num_kv_heads))
    check_rotary_store(q, k, k, pages.k, pages.v, attention.slot_mapping, attention.cos, attention.sin)
    check_pages(q, pages.k, pages.v, pages.k_scale, pages.v_scale)


def check_own(queries: Tensor, own: OwnAttention) -> None:
    """Of queries `[rows, heads, head_dim]`; TypeError for dtypes."""
    if queries.dim() != 3:
        raise ValueError(f"queries must be [rows, heads, head_dim], got {tuple(queries.shape)}")
    (rows, heads, head_dim), pages = queries.shape, own.pages
    check_tensor("k_cache", pages.k, queries.dtype, (None, None, None, head_dim), queries.device)
    check_tensor("v_cache", pages.v, queries.dtype, tuple(pages.k.shape), queries.device)
    if pages.k.shape[1] == 0 or heads % pages.k.shape[1]:
        raise ValueError(f"{heads} query heads are no multiple of {pages.k.shape[1]} key heads")
    check_tensor("block_table", own.block_table, torch.int32, (rows, None), queries.device)
    check_tensor("seq_lens", own.seq_lens, torch.int32, (rows,), queries.device)
    width = own.block_table.shape[1]
    if width == 0 or (width > 1 and own.block_table.stride(1) != 1) or not own.seq_lens.is_contiguous():
        raise ValueError("block_table must have columns, and its rows and seq_lens must be contiguous")
    check_factors(own.softmax_scale)
