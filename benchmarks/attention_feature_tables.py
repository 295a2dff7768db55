"""The tables of the forward's options beside their peers, in docs. Every function takes the folder of results."""

from collections.abc import Callable
from pathlib import Path

from benchmarks import attention_results
from benchmarks.attention_cells import Cell
from benchmarks.attention_results import LABELS, Row
from benchmarks.attention_tables import named, origins, times, untimed
from benchmarks.markdown import table

#: The columns that say which cell it is, and what they are of it.
Names = tuple[list[str], Callable[[Cell], list[str]]]


def shapes(results: Path) -> str | None:
    """Head dims and a dtype that the usual tables have not."""
    names: Names = (["head_dim", "heads", "dtype"], lambda cell: [str(cell.head_dim), str(cell.heads), cell.dtype])
    return _beside(results, "shapes", "Forward, causal", names)


def features(results: Path) -> str | None:
    """Each option alone, beside the peer that is fastest at it, and what it costs."""
    names = (["option", "pairs seen"], _option)
    what = "Forward with one option each, causal, head_dim 128, 16 heads, bf16"
    return _beside(results, "features", what, names, "time over plain causal")


def patterns(results: Path) -> str | None:
    """Block lists beside FlexAttention with the same BlockMask."""
    names = (["pattern", "pairs seen"], _option)
    what = "Forward over block lists, head_dim 128, 16 heads, bf16"
    return _beside(results, "patterns", what, names, "time over the whole triangle (prefix-LM: square)")


def contexts(results: Path) -> str | None:
    """Prompts and chunks of them over pages, beside the peers that read pages."""
    names: Names = (
        ["new tokens", "tokens before them", "page"],
        lambda cell: [f"{cell.seqlen_q:,}", f"{cell.seqlen_k - cell.seqlen_q:,}", str(cell.page)],
    )
    tables = [
        _beside(results, section, f"{what}, causal, head_dim 128, 32 heads over 8 key heads, bf16", names)
        for section, what in (("paged", "Prompts over pages"), ("chunk", "Chunks of long prompts over pages"))
    ]
    return "\n\n".join(table for table in tables if table) or None


def lengths(results: Path) -> str | None:
    """Sequences of different lengths, packed and padded, beside their peers."""
    names: Names = (
        ["head_dim", "mask", "sequences"],
        lambda cell: [str(cell.head_dim), cell.mask, str(cell.batch)],
    )
    tables = [
        _beside(results, section, f"Forward, bf16: {what}", names)
        for section, what in (
            ("varlen", "packed sequences, the longest of them"),
            ("padding", "half of the keys padding"),
        )
    ]
    return "\n\n".join(table for table in tables if table) or None


def _option(cell: Cell) -> list[str]:
    """In words, and the share of the square's pairs that are visible."""
    share = cell.pairs / (cell.batch * cell.seqlen_q * cell.seqlen_k)
    return [cell.options or f"dropout {cell.dropout:g}", f"{100 * share:.0f} %"]


def _beside(results: Path, section: str, what: str, names: Names, cost: str | None = None) -> str | None:
    """A line a cell: ours, the best peer, their ratio and, where `cost` heads a column, the time over the dense twin's.
    Rates count the pairs that are seen."""
    reports = attention_results.with_section(attention_results.runs(results), section)
    rows = attention_results.rows(reports, section)
    if not rows:
        return None
    header, of = names
    header = [*header, "ours", "best peer", "ours / best", *([cost] if cost else [])]
    lines = [[*of(row.cell), *_numbers(row), *([times(row.dense)] if cost else [])] for row in rows]
    timed = {name for row in rows for name in row.ratios}
    peers = named((name for name in LABELS if name in timed), reports) + untimed(reports, section)
    keys = dict.fromkeys(row.cell.seqlen_k for row in rows)
    length = f", {next(iter(keys)):,} tokens" if len(keys) == 1 else ""
    title = f"{what}{length}, TFLOP/s of the pairs seen; peers timed: {peers}"
    return f"{title}\n({origins(reports)}):\n\n" + table(header, lines)


def _numbers(row: Row) -> list[str]:
    best = row.best_peer()
    if best is None:
        return [f"{row.ours:.0f}", "-", "-"]
    return [f"{row.ours:.0f}", f"{LABELS.get(best, best)} {row.peer(best):.0f}", f"{row.ratios[best]:.2f}"]
