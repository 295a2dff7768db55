"""Small attention problems of every layout and option, for tests of the reference."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend.problem import DESC_COLUMNS, AttentionArgs
from attention_backend.reference import standard


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    return integers([0, *torch.tensor(lengths).cumsum(0).tolist()])


def dense(
    dtype: torch.dtype,
    batch: int = 3,
    seqlen_q: int = 37,
    seqlen_k: int = 65,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
) -> AttentionArgs:
    torch.manual_seed(seqlen_q * 1000 + seqlen_k)
    q = torch.randn(batch, seqlen_q, heads[0], dims[0]).to(dtype)
    k = torch.randn(batch, seqlen_k, heads[1], dims[0]).to(dtype)
    v = torch.randn(batch, seqlen_k, heads[1], dims[1]).to(dtype)
    return AttentionArgs(q, k, v, dims[0] ** -0.5)


def varlen(
    dtype: torch.dtype, q_lengths: Sequence[int] = (1, 0, 64, 7, 3), k_lengths: Sequence[int] = (63, 5, 67, 7, 0)
) -> AttentionArgs:
    torch.manual_seed(1)
    q = torch.randn(sum(q_lengths) + 2, 4, 16).to(dtype)  # two rows of nobody
    k, v = torch.randn(sum(k_lengths), 2, 16).to(dtype), torch.randn(sum(k_lengths), 2, 24).to(dtype)
    return AttentionArgs(
        q,
        k,
        v,
        0.25,
        cu_seqlens_q=starts(q_lengths),
        cu_seqlens_k=starts(k_lengths),
        max_seqlen_q=max(q_lengths),
        max_seqlen_k=max(k_lengths),
    )


def paged(
    dtype: torch.dtype, lengths: Sequence[int] = (1, 31, 130, 16), new: Sequence[int] = (1, 5, 70, 16)
) -> AttentionArgs:
    """The engine's pool as a transposed view; table entries past a sequence's length are out of range."""
    torch.manual_seed(2)
    block_size = 16
    blocks = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks) + 2, dtype=torch.int32)
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    used = 0
    for row, count in zip(table, blocks, strict=True):
        row[:count] = order[used : used + count]
        used += count
    pool = (sum(blocks) + 2, 2, block_size)
    return AttentionArgs(
        torch.randn(sum(new), 6, 16).to(dtype),
        torch.randn(*pool, 16).to(dtype).transpose(1, 2),
        torch.randn(*pool, 16).to(dtype).transpose(1, 2),
        0.25,
        cu_seqlens_q=starts(new),
        max_seqlen_q=max(new),
        max_seqlen_k=max(lengths),
        seqused_k=integers(lengths),
        block_table=table,
        window_right=0,
    )


def descriptor() -> Tensor:
    """start, stop, q_offset, left, right, chunk: a left-padded row, a windowed one, a chunked one."""
    desc = torch.zeros(3, DESC_COLUMNS, dtype=torch.int32)
    desc[0, :6] = integers([5, 60, 20, -1, 0, 0])
    desc[1, :6] = integers([0, 65, 28, 9, 2, 0])
    desc[2, :6] = integers([3, 65, 28, -1, 0, 16])
    return desc


def cases(dtype: torch.dtype) -> Iterator[tuple[str, AttentionArgs]]:
    base = dense(dtype)
    heads, used, pad = base.num_heads, integers([65, 20, 0]), integers([0, 7, 60])
    holes = torch.rand(3, 65) > 0.4
    sinks, slopes = torch.randn(heads).to(dtype), torch.rand(heads)
    for sizes in ((1, 1), (1, 63), (63, 64), (64, 65), (65, 64), (67, 131)):
        yield f"causal-{sizes[0]}x{sizes[1]}", replace(dense(dtype, 2, *sizes), window_right=0)
    for count in ((1, 1), (6, 1), (6, 2)):
        yield f"heads-{count[0]}-{count[1]}", replace(dense(dtype, heads=count), window_right=0)
    yield "dims-16-40", dense(dtype, dims=(16, 40))
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"window_left": 11, "window_right": 4},
        "window-causal": {"window_left": 8, "window_right": 0},
        "chunk": {"window_right": 0, "chunk_size": 13},
        "lengths": {"seqused_k": used, "leftpad_k": pad, "window_right": 0},
        "chunk-leftpad": {"leftpad_k": pad, "chunk_size": 10, "window_right": 0},
        "key-mask": {"key_mask": holes, "window_right": 0},
        "descriptor": {"mask_desc": descriptor()},
        "bias": {"bias": torch.randn(3, heads, 37, 65).to(dtype)},
        "bias-broadcast": {"bias": torch.randn(1, heads, 1, 65).to(dtype), "window_right": 0},
        "alibi": {"alibi_slopes": slopes, "window_right": 0},
        "alibi-batch": {"alibi_slopes": torch.rand(3, heads)},
        "softcap": {"softcap": 1.5, "window_right": 0},
        "sinks": {"sinks": sinks, "window_right": 0},
        "everything": {
            **{"softcap": 2.0, "sinks": sinks, "alibi_slopes": slopes, "key_mask": holes, "seqused_k": used},
            **{"bias": torch.randn(3, 1, 37, 65).to(dtype), "window_left": 20, "window_right": 3, "chunk_size": 30},
        },
    }
    for name, changes in options.items():
        yield name, replace(base, **changes)
    yield "varlen", replace(varlen(dtype), window_right=0)
    yield "varlen-window", replace(varlen(dtype), window_left=5, window_right=5, softcap=3.0, sinks=sinks)
    yield "paged", paged(dtype)
    yield "paged-window-chunk", replace(paged(dtype), window_left=9, chunk_size=12)
    decode = paged(dtype, lengths=(1, 31, 130, 0), new=(1, 1, 1, 1))
    yield "paged-decode", replace(decode, q=decode.q.unsqueeze(1), cu_seqlens_q=None, max_seqlen_q=0)


def grid(dtype: torch.dtype) -> list[Any]:
    return [pytest.param(args, id=name) for name, args in cases(dtype)]


def poisoned(args: AttentionArgs, value: float) -> AttentionArgs:
    """The same problem with `value` in every slot of k and v that no row may see."""
    ones = replace(args, k=torch.zeros_like(args.k), v=torch.zeros_like(args.v), sinks=None, bias=None)
    ones = replace(ones, k=ones.k.double().requires_grad_(), v=ones.v.double().requires_grad_(), q=args.q.double())
    (seen,) = torch.autograd.grad(standard.attention(ones)[0].sum(), [ones.v])  # the weight that each slot gets
    unseen = seen.abs().sum(-1, keepdim=True) == 0
    return replace(args, k=args.k.masked_fill(unseen, value), v=args.v.masked_fill(unseen, value))
