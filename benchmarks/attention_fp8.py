"""Our FP8 forward as contenders: quantisation and kernel together, and the kernel alone."""

import torch
from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import OURS, OURS_KERNEL, Call, contender


@contender(OURS, "fp8_forward", "fp8_error")
def float8(cell: Cell, t: Tensors) -> Call:
    from attention_backend.fp8 import flash_attn_fp8_func

    def call() -> Tensor:
        out = flash_attn_fp8_func(t.q, t.k, t.v, causal=cell.causal)
        assert isinstance(out, Tensor)
        return out

    return call


@contender(OURS_KERNEL, "fp8_forward")
def kernel_alone(cell: Cell, t: Tensors) -> Call:
    """On tensors that were quantised before, as FlashAttention-3's number is taken."""
    from attention_backend.heuristics.fp8 import fp8_config
    from attention_backend.kernels import flash_fwd_fp8_sm90, quantize_fp8

    config = fp8_config(cell.head_dim)
    tiles = quantize_fp8.quantize(t.q, t.k, t.v, cell.head_dim**-0.5, config, hadamard=True)
    out = torch.empty_like(t.q)
    lse = t.q.new_empty((cell.batch, cell.heads, cell.seqlen_q), dtype=torch.float32)

    def call() -> Tensor:
        flash_fwd_fp8_sm90.attend(tiles, cell.seqlen_k, out, lse, config, causal=cell.causal)
        return out

    return call
