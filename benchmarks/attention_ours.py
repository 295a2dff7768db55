"""Our contenders: what dispatch chooses, and what it is held against of our own."""

from typing import Any

import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import BLOCK, K_SCALE, V_SCALE, Tensors, as_float8, block_pattern
from benchmarks.attention_registry import (
    OURS,
    OURS_BF16,
    OURS_CONTIGUOUS,
    OURS_DENSE,
    OURS_GENERIC,
    OURS_UNSHARED,
    Call,
    contender,
)

_SEED = 1234


def _window_right(cell: Cell) -> int:
    return 0 if cell.causal else -1


def _run(args: AttentionArgs) -> Call:
    return lambda: dispatch.run(args)[0]


def _contiguous_args(cell: Cell, t: Tensors, **options: Any) -> AttentionArgs:
    return AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=_window_right(cell), **options)


def _paged_args(cell: Cell, t: Tensors) -> AttentionArgs:
    return AttentionArgs(
        t.q,
        t.stored_k.transpose(1, 2),
        t.stored_v.transpose(1, 2),
        cell.head_dim**-0.5,
        block_table=t.table,
        seqused_k=t.used,
        max_seqlen_k=cell.seqlen_k,
        window_right=_window_right(cell),
    )


@contender(OURS_CONTIGUOUS, "decode", "paged", "chunk")
@contender(OURS_BF16, "fp8_forward")
@contender(OURS_DENSE, "varlen", "padding", "chunk", "block_sparse", "dropout", "features", "patterns", twin=True)
@contender(OURS, "forward", "shapes")
def contiguous(cell: Cell, t: Tensors) -> Call:
    return _run(_contiguous_args(cell, t))


@contender(OURS_UNSHARED, "shared_prefix")
@contender(OURS_BF16, "fp8_kv")
@contender(OURS, "decode", "latency", "paged", "chunk")
def paged(cell: Cell, t: Tensors) -> Call:
    return _run(_paged_args(cell, t))


@contender(OURS_GENERIC, "forward", optional=True)
def generic(cell: Cell, t: Tensors) -> Call:
    """The forward for every GPU from sm_75 on, where dispatch may prefer one for this GPU."""
    from attention_backend.kernels import flash_fwd

    args = _contiguous_args(cell, t)
    return lambda: flash_fwd.forward(args)[0]


@contender(OURS, "varlen")
def varlen(cell: Cell, t: Tensors) -> Call:
    longest = {"max_seqlen_q": cell.seqlen_q, "max_seqlen_k": cell.seqlen_k}
    return _run(_contiguous_args(cell, t, cu_seqlens_q=t.cu, cu_seqlens_k=t.cu, **longest))


@contender(OURS, "padding")
def padding(cell: Cell, t: Tensors) -> Call:
    """Keys in use are the first ones, or under a causal mask the last ones, as generation pads."""
    used = {"leftpad_k": cell.seqlen_k - t.used} if cell.causal else {"seqused_k": t.used}
    return _run(_contiguous_args(cell, t, **used))


@contender(OURS, "dropout")
def dropout(cell: Cell, t: Tensors) -> Call:
    seed = torch.tensor([_SEED, 0], dtype=torch.int64, device=t.q.device)
    return _run(_contiguous_args(cell, t, dropout_p=cell.dropout, dropout_seed=seed))


@contender(OURS, "fp8_kv")
def float8_pages(cell: Cell, t: Tensors) -> Call:
    return _run(_float8_args(cell, t))


def _float8_args(cell: Cell, t: Tensors) -> AttentionArgs:
    k_scale, v_scale = (torch.full((cell.kv_heads,), x, device=t.q.device) for x in (K_SCALE, V_SCALE))
    return AttentionArgs(
        t.q,
        as_float8(t.stored_k, K_SCALE).transpose(1, 2),
        as_float8(t.stored_v, V_SCALE).transpose(1, 2),
        cell.head_dim**-0.5,
        block_table=t.table,
        seqused_k=t.used,
        max_seqlen_k=cell.seqlen_k,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@contender(OURS_GENERIC, "decode", "latency", optional=True)
@contender(OURS_GENERIC, "fp8_kv")
def decode_generic(cell: Cell, t: Tensors) -> Call:
    """The decode kernel of all GPUs."""
    from attention_backend.kernels import flash_decode

    args = _float8_args(cell, t) if cell.section == "fp8_kv" else _paged_args(cell, t)
    return lambda: flash_decode.forward(args, tma=False)[0]


@contender(OURS, "shared_prefix")
def shared_prefix(cell: Cell, t: Tensors) -> Call:
    from attention_backend.shared_prefix import shared_prefix_attention

    shared = cell.shared // cell.page
    prefix, suffix = t.table[0, :shared].contiguous(), t.table[:, shared:].contiguous()
    length = torch.full((1,), cell.shared, dtype=torch.int32, device=t.q.device)
    own = t.used - cell.shared
    k, v = t.stored_k.transpose(1, 2), t.stored_v.transpose(1, 2)

    def call() -> Tensor:
        out = shared_prefix_attention(
            t.q,
            k,
            v,
            prefix_block_table=prefix,
            prefix_len=length,
            suffix_block_table=suffix,
            suffix_lens=own,
        )
        assert isinstance(out, Tensor)
        return out

    return call


@contender(OURS, "block_sparse")
def block_sparse(cell: Cell, t: Tensors) -> Call:
    from attention_backend.block_sparse import BlockSparsity, block_sparse_attention

    sparsity = BlockSparsity.from_block_mask(flex_block_mask(cell, t.q.device))

    def call() -> Tensor:
        out = block_sparse_attention(t.q, t.k, t.v, sparsity)
        assert isinstance(out, Tensor)
        return out

    return call


def flex_block_mask(cell: Cell, device: torch.device):  # type: ignore[no-untyped-def]  # BlockMask
    """FlexAttention's BlockMask of a cell's pattern: full blocks only."""
    from torch.nn.attention.flex_attention import BlockMask

    pattern = block_pattern(cell).to(device)
    counts = pattern.sum(1).int()[None, None]
    listed = pattern.int().argsort(dim=1, descending=True, stable=True).int()[None, None]
    none = torch.zeros_like(counts), torch.zeros_like(listed)

    def visible(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return pattern[row // BLOCK, key // BLOCK]

    lengths = (cell.seqlen_q, cell.seqlen_k)
    return BlockMask.from_kv_blocks(*none, counts, listed, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths)
