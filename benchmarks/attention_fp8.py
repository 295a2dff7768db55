"""Our FP8 forward as contenders: quantisation and kernel together, and the kernel alone."""

from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import OURS, Call, contender


@contender(OURS, "fp8_forward", "fp8_error")
def float8(cell: Cell, t: Tensors) -> Call:
    from attention_backend.fp8 import flash_attn_fp8_func

    def call() -> Tensor:
        out: Tensor = flash_attn_fp8_func(t.q, t.k, t.v, causal=cell.causal)
        return out

    return call
