"""Contenders of the backward: every one through autograd, from a forward that was run before.

What is timed is `torch.autograd.grad`: all kernels of the backward, and the host's way to them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_backend import attention, backward, dispatch
from attention_backend.problem import AttentionArgs
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import (
    CUDNN,
    FA2,
    FA3,
    FA4,
    FLEX,
    OURS,
    OURS_DETERMINISTIC,
    OURS_GENERIC,
    Call,
    Output,
    contender,
)

_SECTION = "backward"


def _gradient(t: Tensors, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    with torch.enable_grad():
        out = forward(*leaves)
    grad_out = t.grad_out

    def call() -> Output:
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        return dq, dk, dv

    return call


def _args(cell: Cell, t: Tensors) -> AttentionArgs:
    return AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=0 if cell.causal else -1)


@contender(OURS, _SECTION)
def ours(cell: Cell, t: Tensors) -> Call:
    return _gradient(t, lambda q, k, v: attention(replace(_args(cell, t), q=q, k=k, v=v)))


@contender(OURS_DETERMINISTIC, _SECTION)
def deterministic(cell: Cell, t: Tensors) -> Call:
    args = replace(_args(cell, t), deterministic=True)
    return _gradient(t, lambda q, k, v: attention(replace(args, q=q, k=k, v=v)))


@contender(OURS_GENERIC, _SECTION)
def generic(cell: Cell, t: Tensors) -> Call:
    """The kernel for every GPU from sm_75 on, by its name and without autograd."""
    args = _args(cell, t)
    out, lse = dispatch.run(args)

    def call() -> Output:
        found = backward.run(args, out, lse, t.grad_out, kernel="flash_bwd_sm80")
        return found.dq, found.dk, found.dv

    return call


@contender(CUDNN, _SECTION)
def cudnn(cell: Cell, t: Tensors) -> Call:
    return _sdpa(cell, t, SDPBackend.CUDNN_ATTENTION)


@contender(FA2, _SECTION)
def fa2(cell: Cell, t: Tensors) -> Call:
    return _sdpa(cell, t, SDPBackend.FLASH_ATTENTION)


def _sdpa(cell: Cell, t: Tensors, backend: SDPBackend) -> Call:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = cell.heads != cell.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=gqa)
        return out.transpose(1, 2)

    return _gradient(t, forward)


@contender(FA3, _SECTION)
def fa3(cell: Cell, t: Tensors) -> Call:
    from flash_attn_interface import flash_attn_func

    return _gradient(t, lambda q, k, v: _first(flash_attn_func(q, k, v, causal=cell.causal)))


@contender(FA4, _SECTION)
def fa4(cell: Cell, t: Tensors) -> Call:
    from flash_attn.cute import flash_attn_func

    return _gradient(t, lambda q, k, v: _first(flash_attn_func(q, k, v, causal=cell.causal)))


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions return the log-sum-exp too."""
    return result[0] if isinstance(result, tuple) else result


@contender(FLEX, _SECTION, optional=True)
def flex(cell: Cell, t: Tensors) -> Call:
    """FlexAttention under torch.compile; each shape compiles for some seconds, so it is kept to a few."""
    if cell.head_dim not in (64, 128) or not 2048 <= cell.seqlen_q <= 16384:
        raise NotImplementedError("timed for head_dim 64 and 128 from 2k to 16k only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    device = str(t.q.device)
    mask = create_block_mask(causal, None, None, cell.seqlen_q, cell.seqlen_k, device) if cell.causal else None
    torch._dynamo.reset()  # past its limit of shapes a function is run uncompiled, which is no peer
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = cell.heads != cell.kv_heads

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=gqa)
        return out.transpose(1, 2)

    return _gradient(t, forward)
