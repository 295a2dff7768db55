"""Which cells each section of the attention benchmark has. Knows no device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from statistics import NormalDist

from benchmarks.attention_cells import Cell
from benchmarks.attention_masks import ALIBI, DOCUMENTS, GLOBAL_WINDOW, PREFIX_LM, SINKS, SOFTCAP, WINDOW

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GQA_SEQLENS = (2048, 8192, 32768)
LONGEST = 65536
DECODE = ((1, 1024), (1, 8192), (1, 131072), (8, 32768), (32, 8192), (64, 4096), (64, 1024), (16, 131072))
#: (new tokens, cached prefix) of one sequence
CHUNKS = ((2048, 0), (8192, 0), (32768, 0), (2048, 30720), (8192, 122880))
LONG_CHUNKS = (
    (512, 131072), (128, 32768), (128, 262144), (512, 262144), (512, 1048064), (2048, 32768), (2048, 131072),
    (2048, 262144), (16384, 262144),
)  # fmt: skip
#: 64 requests over 100,000 common tokens (their 1,562 whole pages are shared), 600 own each
SHARED = Cell("shared_prefix", 64, 1, 100_600, 32, 8, 128, False, page=64, shared=99_968)
GRAPH_CALLS = 32  # about a model's layers

_TOKENS = 16384  # of a forward cell: batch * seqlen
_HIDDEN = 2048  # heads * head_dim

Dims = Sequence[int]


def forward_cells(head_dims: Dims = HEAD_DIMS, seqlens: Sequence[int] = SEQLENS) -> Iterator[Cell]:
    """FlashAttention's grid (16k tokens, hidden size 2048), then 32 query heads over 8 key heads at batch 1."""
    for head_dim, causal, seqlen in product(head_dims, (True, False), seqlens):
        batch, heads = max(1, _TOKENS // seqlen), _HIDDEN // head_dim
        yield Cell("forward", batch, seqlen, seqlen, heads, heads, head_dim, causal)
    if 128 in head_dims:
        for seqlen, causal in product(GQA_SEQLENS, (True, False)):
            if seqlen in seqlens:
                yield Cell("forward", 1, seqlen, seqlen, 32, 8, 128, causal)


def backward_cells(head_dims: Dims = HEAD_DIMS, seqlens: Sequence[int] = (*SEQLENS, LONGEST)) -> Iterator[Cell]:
    """The forward's grid, and 64k tokens at head_dim 128, for the memory."""
    for cell in forward_cells(head_dims, [n for n in seqlens if n != LONGEST]):
        yield replace(cell, section="backward")
    if LONGEST in seqlens and 128 in head_dims:
        yield Cell("backward", 1, LONGEST, LONGEST, 16, 16, 128, True)


def decode_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """One query row a sequence, 32 heads over 8, pages of 64."""
    for head_dim, (batch, context) in product(head_dims, DECODE):
        yield Cell("decode", batch, 1, context, 32, 8, head_dim, False, page=64)


def latency_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """A decode step at its shortest: the time of a call among many in a graph, on keys that are in no cache, and of a
    graph that holds one call."""
    for head_dim, calls in product(head_dims, (GRAPH_CALLS, 1)):
        yield Cell("latency", 1, 1, 1024, 32, 8, head_dim, False, page=64, calls=calls)


def paged_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """Prefill through pages of 64 and 128 tokens, beside the same over contiguous keys."""
    for head_dim, page, (new, prefix) in product(head_dims, (64, 128), CHUNKS):
        yield Cell("paged", 1, new, new + prefix, 32, 8, head_dim, True, page=page)


def chunk_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """Few new tokens on a long paged context."""
    for head_dim, (new, prefix) in product(head_dims, LONG_CHUNKS):
        yield Cell("chunk", 1, new, new + prefix, 32, 8, head_dim, True, page=64)


def long_tailed_lengths(count: int = 64, median: int = 1024, longest: int = 16384, sigma: float = 1.15) -> list[int]:
    """Even quantiles of a log-normal distribution, in an order that is mixed but always the same."""
    normal = NormalDist()
    lengths = [
        min(longest, round(median * 2.718281828 ** (sigma * normal.inv_cdf((i + 0.5) / count)))) for i in range(count)
    ]
    Random(0).shuffle(lengths)
    return lengths


def varlen_cells(head_dims: Dims = (64, 128)) -> Iterator[Cell]:
    lengths = tuple(long_tailed_lengths())
    for head_dim, causal in product(head_dims, (True, False)):
        heads = _HIDDEN // head_dim
        yield Cell("varlen", len(lengths), max(lengths), max(lengths), heads, heads, head_dim, causal, lengths=lengths)


def padding_cells(head_dims: Dims = (64, 128), batch: int = 16, seqlen: int = 4096) -> Iterator[Cell]:
    """Half the keys are padding: lengths even over the range. Full masks pad on the right, causal ones on the left."""
    lengths = [seqlen * (2 * i + 1) // (2 * batch) for i in range(batch)]
    Random(0).shuffle(lengths)
    for head_dim, causal in product(head_dims, (True, False)):
        heads = _HIDDEN // head_dim
        yield Cell("padding", batch, seqlen, seqlen, heads, heads, head_dim, causal, lengths=tuple(lengths))


def shared_prefix_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    if SHARED.head_dim in head_dims:
        yield SHARED


def fp8_kv_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    for head_dim, (batch, context) in product(head_dims, ((1, 131072), (16, 131072), (64, 4096))):
        yield Cell("fp8_kv", batch, 1, context, 32, 8, head_dim, False, page=64)


def fp8_forward_cells(head_dims: Dims = (128, 64, 256)) -> Iterator[Cell]:
    for head_dim, (seqlen, causal) in product(head_dims, ((16384, False), (16384, True), (4096, False))):
        heads = _HIDDEN // head_dim
        yield Cell("fp8_forward", _TOKENS // seqlen, seqlen, seqlen, heads, heads, head_dim, causal)


def fp8_error_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """Outlier data; what counts is the error, not the time."""
    for head_dim in head_dims:
        yield Cell("fp8_error", 1, 4096, 4096, 16, 16, head_dim, False)


def block_sparse_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    for head_dim, density in product(head_dims, (0.25, 0.125, 0.5)):
        heads = _HIDDEN // head_dim
        yield Cell("block_sparse", 1, 32768, 32768, heads, heads, head_dim, False, density=density)


def dropout_cells(head_dims: Dims = (64, 128)) -> Iterator[Cell]:
    for head_dim, causal in product(head_dims, (True, False)):
        heads = _HIDDEN // head_dim
        yield Cell("dropout", 4, 4096, 4096, heads, heads, head_dim, causal, dropout=0.1)


def shapes_cells(head_dims: Dims = (80, 96, 192, 128)) -> Iterator[Cell]:
    """Head dims that the forward's grid has not, and float16."""
    for head_dim, dtype in ((80, "bfloat16"), (96, "bfloat16"), (192, "bfloat16"), (128, "float16")):
        if head_dim in head_dims:
            heads = _HIDDEN // head_dim
            yield Cell("shapes", 1, _TOKENS, _TOKENS, heads, heads, head_dim, True, dtype=dtype)


def features_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """Options of the forward, each alone on the same causal square."""
    for head_dim in head_dims:
        heads = _HIDDEN // head_dim
        plain = Cell("features", 1, _TOKENS, _TOKENS, heads, heads, head_dim, True)
        for option, amount in ((WINDOW, 4096), (SOFTCAP, 50), (SINKS, 0), (ALIBI, 0)):
            yield replace(plain, option=option, amount=amount)
        yield replace(plain, dropout=0.1)


def patterns_cells(head_dims: Dims = (128,)) -> Iterator[Cell]:
    """Block lists of what models see: a window of 1,024 keys and 64 global ones, a prefix of 4,096 keys that every row
    sees, 16 documents."""
    for head_dim in head_dims:
        heads = _HIDDEN // head_dim
        for option, amount in ((GLOBAL_WINDOW, 1024), (PREFIX_LM, 4096), (DOCUMENTS, 16)):
            causal = option != PREFIX_LM
            yield Cell("patterns", 1, _TOKENS, _TOKENS, heads, heads, head_dim, causal, option=option, amount=amount)


#: Every section with its cells, in the order they are timed.
GRID: dict[str, Callable[..., Iterator[Cell]]] = {
    "forward": forward_cells,
    "backward": backward_cells,
    "decode": decode_cells,
    "latency": latency_cells,
    "paged": paged_cells,
    "chunk": chunk_cells,
    "varlen": varlen_cells,
    "padding": padding_cells,
    "shared_prefix": shared_prefix_cells,
    "fp8_kv": fp8_kv_cells,
    "fp8_forward": fp8_forward_cells,
    "fp8_error": fp8_error_cells,
    "block_sparse": block_sparse_cells,
    "dropout": dropout_cells,
    "shapes": shapes_cells,
    "features": features_cells,
    "patterns": patterns_cells,
}
SECTIONS = tuple(GRID)
_QUICK_DECODE = ((1, 8192), (8, 32768), (16, 131072))


def quick(cells: Sequence[Cell]) -> list[Cell]:
    """A few cells of each section, the goals' among them: a minute instead of several."""
    kept = []
    seen: set[str] = set()
    for cell in cells:
        if cell.section in ("forward", "backward"):
            keep = cell.heads == cell.kv_heads and cell.head_dim in (64, 128) and cell.seqlen_q in (2048, 8192)
        elif cell.section == "decode":
            keep = (cell.batch, cell.seqlen_k) in _QUICK_DECODE
        elif cell.section == "paged":
            keep = cell.seqlen_k <= 8192
        else:
            keep = cell.section not in seen
        seen.add(cell.section)
        if keep:
            kept.append(cell)
    return kept


def select(sections: Sequence[str], head_dims: Sequence[int] | None, seqlens: Sequence[int] | None) -> list[Cell]:
    """The cells of the sections asked for; None leaves each section its own list. `seqlens` are lengths of keys."""
    cells: list[Cell] = []
    for section in SECTIONS:
        if section not in sections:
            continue
        if section in ("forward", "backward"):
            every = SEQLENS if section == "forward" else (*SEQLENS, LONGEST)
            cells += GRID[section](head_dims or HEAD_DIMS, seqlens or every)
            continue
        own = GRID[section](head_dims) if head_dims else GRID[section]()
        cells += [cell for cell in own if seqlens is None or cell.seqlen_k in seqlens]
    return cells
