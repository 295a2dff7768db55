"""Who is timed: a registry of functions that turn a cell and its tensors into a call. A new peer is a new function.

A contender that cannot run a cell raises; the reason is recorded beside the cells it can run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from benchmarks.attention_cells import Cell

Call = Callable[[], Tensor]  # returns [batch, seqlen_q, heads, head_dim]
_TRUTH_ROWS = 256
OURS, OURS_GENERIC, OURS_CONTIGUOUS, FA2 = "longwave", "longwave-generic", "longwave-contiguous", "fa2"


@dataclass(frozen=True)
class Tensors:
    """One input set. k and v are the pages' contents in order; `k_pages` is `[blocks, kv_heads, page, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor | None = None
    v_pages: Tensor | None = None
    block_table: Tensor | None = None
    lens: Tensor | None = None

    @classmethod
    def random(cls, cell: Cell, device: torch.device) -> "Tensors":
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        q = normal(cell.batch, cell.seqlen_q, cell.heads, cell.head_dim)
        if not cell.page:
            k, v = (normal(cell.batch, cell.seqlen_k, cell.kv_heads, cell.head_dim) for _ in range(2))
            return cls(q, k, v)
        blocks = cell.seqlen_k // cell.page
        table = torch.randperm(cell.batch * blocks, device=device).view(cell.batch, blocks).int()
        pages = [normal(cell.batch * blocks, cell.kv_heads, cell.page, cell.head_dim) for _ in range(2)]
        k, v = (p[table.long()].transpose(2, 3).flatten(1, 2).contiguous() for p in pages)
        lens = torch.full((cell.batch,), cell.seqlen_k, dtype=torch.int32, device=device)
        return cls(q, k, v, pages[0], pages[1], table, lens)


@dataclass(frozen=True)
class Contender:
    name: str
    sections: tuple[str, ...]
    make: Callable[[Cell, Tensors], Call]
    optional: bool = False


REGISTRY: dict[str, Contender] = {}


def contender(
    name: str, *sections: str, optional: bool = False
) -> Callable[[Callable[[Cell, Tensors], Call]], Callable[[Cell, Tensors], Call]]:
    def register(make: Callable[[Cell, Tensors], Call]) -> Callable[[Cell, Tensors], Call]:
        REGISTRY[name] = Contender(name, sections, make, optional)
        return make

    return register


def _contiguous_args(cell: Cell, t: Tensors) -> AttentionArgs:
    return AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=0 if cell.causal else -1)


@contender(OURS, "forward", "decode", "paged")
def longwave(cell: Cell, t: Tensors) -> Call:
    args = _contiguous_args(cell, t)
    if t.k_pages is not None and t.v_pages is not None:
        args = AttentionArgs(
            t.q,
            t.k_pages.transpose(1, 2),
            t.v_pages.transpose(1, 2),
            cell.head_dim**-0.5,
            block_table=t.block_table,
            seqused_k=t.lens,
            max_seqlen_k=cell.seqlen_k,
            window_right=0 if cell.causal else -1,
        )
    return lambda: dispatch.run(args)[0]


@contender(OURS_GENERIC, "forward")
def longwave_generic(cell: Cell, t: Tensors) -> Call:
    """The forward for every GPU from sm_75 on, where dispatch may prefer one for this GPU."""
    from attention_backend.kernels import flash_fwd

    args = _contiguous_args(cell, t)
    return lambda: flash_fwd.forward(args)[0]


@contender(OURS_CONTIGUOUS, "decode", "paged")
def longwave_contiguous(cell: Cell, t: Tensors) -> Call:
    args = _contiguous_args(cell, t)
    return lambda: dispatch.run(args)[0]


def _sdpa(backend: SDPBackend) -> Callable[[Cell, Tensors], Call]:
    def make(cell: Cell, t: Tensors) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
        gqa = cell.heads != cell.kv_heads

        def call() -> Tensor:
            with sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=cell.causal and cell.seqlen_q > 1, enable_gqa=gqa
                )
            return out.transpose(1, 2)

        return call

    return make


contender("cudnn", "forward", "decode")(_sdpa(SDPBackend.CUDNN_ATTENTION))
contender(FA2, "forward", "decode")(_sdpa(SDPBackend.FLASH_ATTENTION))
contender("mem-eff", "forward", "decode")(_sdpa(SDPBackend.EFFICIENT_ATTENTION))


@contender("fa2-chunk", "paged")
def fa2_chunk(cell: Cell, t: Tensors) -> Call:
    """FlashAttention-2 on contiguous keys, the mask aligned to the last key."""
    mask = causal_lower_right(cell.seqlen_q, cell.seqlen_k)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return call


@contender("flex", "forward", optional=True)
def flex(cell: Cell, t: Tensors) -> Call:
    """FlexAttention under torch.compile; each shape compiles for some seconds, so it is asked for and kept to a few."""
    if cell.head_dim not in (64, 128) or not 2048 <= cell.seqlen_q <= 16384:
        raise NotImplementedError("timed for head_dim 64 and 128 from 2k to 16k only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    device = str(t.q.device)
    mask = create_block_mask(causal, None, None, cell.seqlen_q, cell.seqlen_k, device) if cell.causal else None
    torch._dynamo.reset()  # past its limit of shapes a function is run uncompiled, which is no peer
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    gqa = cell.heads != cell.kv_heads
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)


def relative_error(cell: Cell, t: Tensors, out: Tensor) -> float:
    """The worst sequence's |out - truth| / |truth| (Frobenius norms); NaN when any is NaN."""
    errors = []
    for b in range(cell.batch):
        truth = _truth(cell, t, b).float()
        errors.append(((out[b].transpose(0, 1).float() - truth).norm() / truth.norm()).item())
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _truth(cell: Cell, t: Tensors, b: int) -> Tensor:
    """Sequence b by torch SDPA with every query head's keys spelt out, `[heads, seqlen_q, head_dim]`."""
    group = cell.heads // cell.kv_heads
    q = t.q[b].transpose(0, 1)[None]
    k, v = (x[b].transpose(0, 1).repeat_interleave(group, 0)[None] for x in (t.k, t.v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if not cell.causal or cell.seqlen_q == cell.seqlen_k:
        return sdpa(q, k, v, is_causal=cell.causal)[0]
    # is_causal aligns top-left, so the mask is spelt out, in pieces that fit even as plain matrix products.
    keys, rows = (torch.arange(n, device=q.device) for n in (cell.seqlen_k, cell.seqlen_q))
    positions = rows + cell.seqlen_k - cell.seqlen_q
    pieces = [
        sdpa(q[:, :, part], k, v, attn_mask=keys[None, :] <= positions[part, None]) for part in rows.split(_TRUTH_ROWS)
    ]
    return torch.cat(pieces, dim=2)[0]
