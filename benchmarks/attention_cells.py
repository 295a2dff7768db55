"""The cells of the attention benchmark: shapes, and the operations and bytes they are counted as. Knows no device."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

SECTIONS = ("forward", "decode", "paged")
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GQA_SEQLENS = (2048, 8192, 32768)
DECODE = ((1, 1024), (1, 8192), (1, 131072), (8, 32768), (32, 8192), (64, 4096), (64, 1024), (16, 131072))
#: (new tokens, cached prefix) of one sequence
CHUNKS = ((2048, 0), (8192, 0), (32768, 0), (2048, 6144), (2048, 30720), (8192, 122880))
_TOKENS = 16384  # of a forward cell: batch * seqlen
_HIDDEN = 2048  # heads * head_dim
_BYTES = 2  # of a bf16


@dataclass(frozen=True)
class Cell:
    """One bf16 problem: q `[batch, seqlen_q, heads, head_dim]`, k and v `[batch, seqlen_k, kv_heads, head_dim]`."""

    section: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    page: int = 0  # 0: contiguous keys only

    @property
    def flops(self) -> int:
        """4 * pairs * head_dim with pairs = query rows * keys, less the masked half of the causal square."""
        pairs = self.seqlen_q * self.seqlen_k - (self.seqlen_q * self.seqlen_q // 2 if self.causal else 0)
        return 4 * self.batch * self.heads * pairs * self.head_dim

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.seqlen_k * self.kv_heads * self.head_dim * _BYTES

    @property
    def input_bytes(self) -> int:
        return self.kv_bytes + self.batch * self.seqlen_q * self.heads * self.head_dim * _BYTES

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def forward_cells(head_dims: Sequence[int] = HEAD_DIMS, seqlens: Sequence[int] = SEQLENS) -> Iterator[Cell]:
    """FlashAttention's grid (16k tokens, hidden size 2048), then 32 query heads over 8 key heads at batch 1."""
    for head_dim, causal, seqlen in product(head_dims, (True, False), seqlens):
        batch, heads = max(1, _TOKENS // seqlen), _HIDDEN // head_dim
        yield Cell("forward", batch, seqlen, seqlen, heads, heads, head_dim, causal)
    if 128 in head_dims:
        for seqlen, causal in product(GQA_SEQLENS, (True, False)):
            if seqlen in seqlens:
                yield Cell("forward", 1, seqlen, seqlen, 32, 8, 128, causal)


def decode_cells(head_dims: Sequence[int] = (128,), contexts: Sequence[int] | None = None) -> Iterator[Cell]:
    """One query row a sequence, 32 heads over 8, pages of 64."""
    for head_dim, (batch, context) in product(head_dims, DECODE):
        if contexts is None or context in contexts:
            yield Cell("decode", batch, 1, context, 32, 8, head_dim, False, page=64)


def paged_cells(head_dims: Sequence[int] = (128,), seqlens: Sequence[int] | None = None) -> Iterator[Cell]:
    """Chunked prefill through pages of 64 beside the same chunk over contiguous keys."""
    for head_dim, (new, prefix) in product(head_dims, CHUNKS):
        if seqlens is None or new + prefix in seqlens:
            yield Cell("paged", 1, new, new + prefix, 32, 8, head_dim, True, page=64)


def quick(cells: Sequence[Cell]) -> list[Cell]:
    """A few cells of each section, the goals' among them: a minute instead of several."""
    forward = [c for c in cells if c.section == "forward" and c.heads == c.kv_heads]
    keep = [c for c in forward if c.head_dim in (64, 128) and c.seqlen_q in (2048, 8192)]
    keep += [
        c for c in cells if c.section == "decode" and (c.batch, c.seqlen_k) in ((1, 8192), (8, 32768), (16, 131072))
    ]
    return keep + [c for c in cells if c.section == "paged" and c.seqlen_k <= 8192]


def select(sections: Sequence[str], head_dims: Sequence[int] | None, seqlens: Sequence[int] | None) -> list[Cell]:
    """The cells of the sections asked for; None leaves each section its own list."""
    cells: list[Cell] = []
    if "forward" in sections:
        cells += forward_cells(head_dims or HEAD_DIMS, seqlens or SEQLENS)
    if "decode" in sections:
        cells += decode_cells(head_dims or (128,), seqlens)
    if "paged" in sections:
        cells += paged_cells(head_dims or (128,), seqlens)
    return cells
