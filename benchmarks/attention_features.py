"""Contenders of the features (windows, softcap, sinks, ALiBi, dropout) and patterns (block lists): ours and the peers
that can express them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attention_backend import dispatch
from attention_backend.block_sparse import BlockSparsity, block_sparse_attention
from attention_backend.problem import AttentionArgs
from benchmarks import attention_ours, attention_peers, attention_torch
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_masks import ALIBI, SINKS, SOFTCAP, WINDOW, sees
from benchmarks.attention_registry import CUDNN, FA2, FA3, FLEX, OURS, Call, contender


def _cannot(who: str, cell: Cell) -> NotImplementedError:
    return NotImplementedError(f"{who} has no {cell.option or 'dropout'}")


@contender(OURS, "features")
def features(cell: Cell, t: Tensors) -> Call:
    if cell.dropout:
        return attention_ours.dropout(cell, t)
    options: dict[str, dict[str, Any]] = {
        WINDOW: {"window_left": cell.amount - 1},
        SOFTCAP: {"softcap": float(cell.amount)},
        SINKS: {"sinks": t.sinks},
        ALIBI: {"alibi_slopes": t.slopes},
    }
    args = AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=0, **options[cell.option])
    return lambda: dispatch.run(args)[0]


@contender(OURS, "patterns")
def patterns(cell: Cell, t: Tensors) -> Call:
    sparsity = BlockSparsity.from_block_mask(block_mask(cell, t.q.device))

    def call() -> Tensor:
        out = block_sparse_attention(t.q, t.k, t.v, sparsity)
        assert isinstance(out, Tensor)
        return out

    return call


@contender(CUDNN, "features")
def cudnn(cell: Cell, t: Tensors) -> Call:
    if not cell.dropout:
        raise _cannot("SDPA on cuDNN", cell)
    return attention_torch.sdpa(SDPBackend.CUDNN_ATTENTION)(cell, t)


@contender(FA2, "features")
def fa2(cell: Cell, t: Tensors) -> Call:
    """SDPA, and for a window the operator below it, whose arguments are FlashAttention-2's."""
    if cell.dropout:
        return attention_torch.sdpa(SDPBackend.FLASH_ATTENTION)(cell, t)
    if cell.option != WINDOW:
        raise _cannot("FlashAttention-2 as torch builds it", cell)
    return lambda: attention_torch.windowed(t.q, t.k, t.v, cell)


@contender(FA3, "features")
def fa3(cell: Cell, t: Tensors) -> Call:
    from flash_attn_interface import flash_attn_func

    if cell.option not in (WINDOW, SOFTCAP):
        raise _cannot("FlashAttention-3", cell)
    options: dict[str, Any] = {"window_size": (cell.amount - 1, 0)}
    if cell.option == SOFTCAP:
        options = {"softcap": float(cell.amount)}
    return lambda: attention_peers.first(flash_attn_func(t.q, t.k, t.v, causal=True, **options))


@contender(FLEX, "features", "patterns", optional=True)
def flex(cell: Cell, t: Tensors) -> Call:
    """Masks as a BlockMask, scores by a score_mod; sinks as users of FlexAttention have them, by scaling its result."""
    if cell.dropout:
        raise _cannot("FlexAttention", cell)
    cap, slopes = cell.amount, t.slopes
    mods = {
        SOFTCAP: lambda score, _b, _h, _row, _key: cap * torch.tanh(score / cap),
        ALIBI: lambda score, _b, h, row, key: score - slopes[h] * (row - key),
    }
    sinks = t.sinks if cell.option == SINKS else None
    mask = block_mask(cell, t.q.device)
    return attention_torch.compiled_flex(cell, t, mask, score_mod=mods.get(cell.option), sinks=sinks)


def block_mask(cell: Cell, device: torch.device):  # type: ignore[no-untyped-def]  # BlockMask
    """FlexAttention's BlockMask of a cell's option, the same for every sequence and head."""
    from torch.nn.attention.flex_attention import create_block_mask

    visible = sees(cell.option, cell.amount, cell.seqlen_k, device)

    def mask_mod(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return visible(row, key)

    return create_block_mask(mask_mod, None, None, cell.seqlen_q, cell.seqlen_k, str(device))
