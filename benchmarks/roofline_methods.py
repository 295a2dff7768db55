"""The methods of the roofline: how each is called, and what it costs on paper. A new method is a new function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from attention_backend.reference import rabe_staats
from benchmarks.roofline_counts import (
    RABE_STAATS_KEYS,
    RABE_STAATS_ROWS,
    Shape,
    rabe_staats_bytes,
    standard_bytes,
    standard_memory,
)

Call = Callable[[], Tensor]  # returns [1, rows, heads, head_dim]
Tensors = tuple[Tensor, Tensor, Tensor]  # q, k, v: [1, rows or keys, heads, head_dim]

STANDARD, RABE_STAATS, GENERIC, HOPPER, DECODE = "standard", "rabe-staats", "generic", "hopper", "decode"
OURS = (GENERIC, HOPPER, DECODE)


class NotServedError(Exception):
    """A method does not serve a shape, or not on this GPU; the text says why."""


@dataclass(frozen=True, slots=True)
class Method:
    """
    * counted: bytes to and from HBM on paper, used where the counters were not read
    * every_score: computes masked scores too
    * causal: has a causal mask that makes a difference
    * memory: bytes it is known to need beyond inputs and output; a shape that does not fit is not tried
    """

    name: str
    title: str
    make: Callable[[Shape, Tensors], Call]
    counted: Callable[[Shape], int]
    every_score: bool = False
    causal: bool = True
    memory: Callable[[Shape], int] = lambda _: 0

    def flops_done(self, shape: Shape) -> int:
        return shape.flops_unmasked if self.every_score else shape.flops

    def shape(self, seqlen: int, causal: bool) -> Shape:
        """A square one; for decode one row. Raises NotServedError for a causal one without difference."""
        if causal and not self.causal:
            raise NotServedError(f"{self.title} has no causal case")
        return Shape(1 if self.name == DECODE else seqlen, seqlen, causal=causal)

    def shapes(self, seqlens: Sequence[int]) -> list[Shape]:
        return [self.shape(n, causal) for causal in ((False, True) if self.causal else (False,)) for n in seqlens]


def random_tensors(shape: Shape, device: torch.device) -> Tensors:
    def normal(length: int) -> Tensor:
        return torch.randn(1, length, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)

    return normal(shape.rows), normal(shape.keys), normal(shape.keys)


def _args(shape: Shape, tensors: Tensors) -> AttentionArgs:
    return AttentionArgs(*tensors, shape.head_dim**-0.5, window_right=0 if shape.causal else -1)


def standard(shape: Shape, tensors: Tensors) -> Call:
    """Scores and weights as tensors, `[heads, rows, keys]`: softmax(q k^T / sqrt(d)) v by torch."""
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    scale = shape.head_dim**-0.5
    hidden = torch.ones(shape.rows, shape.keys, dtype=torch.bool, device=q.device).triu(1) if shape.causal else None

    def call() -> Tensor:
        scores = q.new_empty(shape.heads, shape.rows, shape.keys)
        scores.baddbmm_(q, k.mT, beta=0, alpha=scale)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        del scores
        return (weights @ v).transpose(0, 1)[None]

    return call


def rabe_staats_in_parts(shape: Shape, tensors: Tensors) -> Call:
    """RABE_STAATS_ROWS query rows after the other, RABE_STAATS_KEYS keys at a time, as the paper's listing does."""
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    scale = shape.head_dim**-0.5

    def call() -> Tensor:
        out = torch.empty_like(tensors[0])
        parts = zip(q.split(RABE_STAATS_ROWS, 1), out[0].transpose(0, 1).split(RABE_STAATS_ROWS, 1), strict=True)
        for q_part, out_part in parts:
            out_part.copy_(rabe_staats.forward(q_part, k, v, scale, RABE_STAATS_KEYS))
        return out

    return call


def generic(shape: Shape, tensors: Tensors) -> Call:
    from attention_backend.kernels import flash_fwd

    args = _args(shape, tensors)
    return lambda: flash_fwd.forward(args)[0]


def hopper(shape: Shape, tensors: Tensors) -> Call:
    """By dispatch, as users call it."""
    args = _args(shape, tensors)
    kernel = dispatch.select(args).kernel
    if kernel != "flash_fwd_sm90":
        raise NotServedError(f"dispatch chooses {kernel} here")
    return lambda: dispatch.run(args)[0]


def decode(shape: Shape, tensors: Tensors) -> Call:
    """One query row on the keys."""
    from attention_backend.kernels import flash_decode

    args = _args(shape, tensors)
    return lambda: flash_decode.forward(args)[0]


def _least(shape: Shape) -> int:
    return shape.least_bytes


METHODS = {
    method.name: method
    for method in (
        Method(STANDARD, "standard attention", standard, standard_bytes, True, memory=standard_memory),
        Method(RABE_STAATS, "Rabe & Staats", rabe_staats_in_parts, rabe_staats_bytes, causal=False),
        Method(GENERIC, "ours, any GPU", generic, _least),
        Method(HOPPER, "ours, Hopper", hopper, _least),
        Method(DECODE, "ours, decode", decode, _least, causal=False),
    )
}
