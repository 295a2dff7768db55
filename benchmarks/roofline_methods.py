"""The methods of the roofline: how each is called, what it costs on paper, what its result is held to.

A new method is a new function and a line of OURS or PEERS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.reference import rabe_staats
from benchmarks import roofline_counts as counts
from benchmarks import roofline_ours as ours
from benchmarks.roofline_counts import RABE_STAATS_KEYS, RABE_STAATS_ROWS, Shape, Work
from benchmarks.roofline_ours import Call, NotServedError, Outputs, Tensors

STANDARD, RABE_STAATS, GENERIC, HOPPER, DECODE = "standard", "rabe-staats", "generic", "hopper", "decode"
SQUARE = 0
REQUESTS = 64  # that share keys


@dataclass(frozen=True, slots=True)
class Method:
    """
    * causal: has a causal mask that makes a difference
    * rows: query rows of every shape; SQUARE: as many as keys
    * truth: what the outputs should be, and tolerance how far off they may be, relative (Frobenius)
    * memory: bytes it is known to need beyond inputs and output; a shape that does not fit is not tried
    """

    name: str
    title: str
    make: Callable[[Shape, Tensors], Call]
    work: Callable[[Shape], Work] = counts.forward_work
    causal: bool = True
    rows: int = SQUARE
    truth: Callable[[Shape, Tensors], Outputs] = ours.softmax_attention
    tolerance: float = 2e-2  # bfloat16 scores alone are about 5e-3
    memory: Callable[[Shape], int] = lambda _: 0

    def shape(self, seqlen: int, causal: bool) -> Shape:
        """Raises NotServedError for a causal one without difference."""
        if causal and not self.causal:
            raise NotServedError(f"{self.title} has no causal case")
        return Shape(seqlen if self.rows == SQUARE else self.rows, seqlen, causal=causal)

    def shapes(self, seqlens: Sequence[int]) -> list[Shape]:
        return [self.shape(n, causal) for causal in ((False, True) if self.causal else (False,)) for n in seqlens]


def random_tensors(shape: Shape, device: torch.device) -> Tensors:
    def normal(length: int) -> Tensor:
        return torch.randn(1, length, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)

    return normal(shape.rows), normal(shape.keys), normal(shape.keys)


def standard(shape: Shape, tensors: Tensors) -> Call:
    """Scores and weights as tensors, `[heads, rows, keys]`: softmax(q k^T / sqrt(d)) v by torch."""
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    scale = shape.head_dim**-0.5
    hidden = torch.ones(shape.rows, shape.keys, dtype=torch.bool, device=q.device).triu(1) if shape.causal else None

    def call() -> Outputs:
        scores = q.new_empty(shape.heads, shape.rows, shape.keys)
        scores.baddbmm_(q, k.mT, beta=0, alpha=scale)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        del scores
        return ((weights @ v).transpose(0, 1)[None],)

    return call


def rabe_staats_in_parts(shape: Shape, tensors: Tensors) -> Call:
    """RABE_STAATS_ROWS query rows after the other, RABE_STAATS_KEYS keys at a time, as the paper's listing does."""
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    scale = shape.head_dim**-0.5

    def call() -> Outputs:
        out = torch.empty_like(tensors[0])
        parts = zip(q.split(RABE_STAATS_ROWS, 1), out[0].transpose(0, 1).split(RABE_STAATS_ROWS, 1), strict=True)
        for q_part, out_part in parts:
            out_part.copy_(rabe_staats.forward(q_part, k, v, scale, RABE_STAATS_KEYS))
        return (out,)

    return call


PEERS = (
    Method(STANDARD, "standard attention", standard, counts.standard_work, memory=counts.standard_memory),
    Method(RABE_STAATS, "Rabe & Staats", rabe_staats_in_parts, counts.rabe_staats_work, causal=False),
)
OURS = (
    Method(GENERIC, "ours, any GPU", ours.generic),
    Method("float32", "ours, float32", ours.float32, counts.float32_work),
    Method(HOPPER, "ours, Hopper", ours.hopper),
    Method("fp8", "ours, FP8 on Hopper", ours.fp8, counts.fp8_work, tolerance=8e-2),
    Method(
        "documents", f"ours, block-sparse: {counts.DOCUMENTS} documents", ours.documents, counts.documents_work,
        truth=ours.attention_by_document,
    ),
    Method(DECODE, "ours, decode", ours.decode, causal=False, rows=1),
    Method(
        "decode-fp8", "ours, decode on e4m3 keys", ours.decode_fp8, counts.fp8_keys_work, causal=False, rows=1,
        truth=ours.attention_of_e4m3,
    ),
    Method(
        "shared-prefix", f"ours, {REQUESTS} requests on shared keys", ours.shared_prefix, causal=False, rows=REQUESTS
    ),
    Method("linear", "ours, linear attention", ours.linear, counts.linear_work, truth=ours.linear_truth),
    Method(
        "backward", "ours, backward, any GPU", ours.backward_by("flash_bwd_sm80"), counts.backward_work,
        truth=ours.gradients,
    ),
    Method(
        "backward-hopper", "ours, backward, Hopper", ours.backward_by("flash_bwd_sm90"), counts.backward_work,
        truth=ours.gradients,
    ),
)  # fmt: skip
METHODS = {method.name: method for method in (*PEERS, *OURS)}
