"""Tiles of one kernel beside each other: who races, the run from cell to cell, the table. Knows no kernel."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer

from benchmarks import machine
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY, Contender, peer_versions
from benchmarks.attention_registry import OURS, Make, found
from benchmarks.attention_report import Record, Report, plain_table
from benchmarks.attention_timing import compile_ahead, time_cell
from benchmarks.stopwatch import Stopwatch

_Tile = TypeVar("_Tile")


def contenders(
    section: str, tiles: Sequence[_Tile], only: Sequence[str] | None, make: Callable[[_Tile], Make]
) -> list[Contender]:
    """The first tile, the default, as OURS; of the others all, or those that are named."""
    default, *others = tiles
    chosen = [tile for tile in others if only is None or str(tile) in only]
    names = {OURS: default} | {f"{OURS}-{tile}": tile for tile in chosen}
    return [Contender(name, {section: make(tile)}) for name, tile in names.items()]


def peers(names: Sequence[str]) -> list[Contender]:
    """Those of the benchmark's contenders that can be imported here."""
    return [REGISTRY[name] for name in names if (p := REGISTRY[name].package) is None or found(p)]


def chosen_names(given: str | None, known: Sequence[object]) -> list[str] | None:
    """The tiles that an option names, or None for all. Raises typer.BadParameter for a name that no tile has."""
    names, there = given.split(",") if given else None, {str(tile) for tile in known}
    if unknown := set(names or ()) - there:
        raise typer.BadParameter(f"no tile named {sorted(unknown)}; there are {', '.join(sorted(there))}")
    return names


def square_cells(cells: Iterable[Cell], causal: bool | None) -> list[Cell]:
    """Those with as many key heads as query heads, of one mask or (None) both. Raises typer.BadParameter for none."""
    chosen = [cell for cell in cells if causal in (None, cell.causal) and cell.heads == cell.kv_heads]
    if not chosen:
        raise typer.BadParameter("no cell has these dimensions")
    return chosen


def race(
    cells: Sequence[Cell],
    ours: Mapping[int, Sequence[Contender]],
    others: Sequence[Contender],
    watch: Stopwatch,
    options: Mapping[str, Any],
    out: Path | None,
    commit: str | None,
) -> None:
    """Times the cells, `ours` of each cell's head_dim and the others in turns, and prints a table for each head_dim.

    Raises typer.Exit(1) where one of ours was wrong or failed.
    """
    report = Report(machine.facts(commit), {**options, "peers": peer_versions()})
    typer.echo(str({name: report.machine[name] for name in ("gpu", "driver", "torch", "cudnn", "commit")}))
    for dim, racing in ours.items():
        compile_ahead([cell for cell in cells if cell.head_dim == dim], racing, watch.device)
    for cell in cells:
        report.records.append(time_cell(cell, [*ours[cell.head_dim], *others], watch, options["rounds"]))
        torch.cuda.empty_cache()
        typer.echo(table(report.records[-1:]).rpartition("\n")[0])
        if out:
            report.write(out)
    for dim in ours:
        typer.echo("\n" + table([r for r in report.records if r.cell.head_dim == dim]))
    typer.echo("\n".join(report.missing()))
    results = [result for r in report.records for name, result in r.results.items() if name.startswith(OURS)]
    if any(result.ms is None for result in results):
        raise typer.Exit(1)


def table(records: Sequence[Record]) -> str:
    """Of one head_dim; the last row is the geometric mean of each column's ratios."""
    others = [name for name in dict.fromkeys(name for r in records for name in r.results) if name != OURS]
    ratios = {name: [r.times_as_fast(name, OURS) for r in records] for name in others}
    rows = [
        [str(r.cell.head_dim), r.cell.mask, f"{r.cell.batch}x{r.cell.seqlen_k}", _text(r.rate(OURS), 0)]
        + [_text(ratios[name][i], 3) for name in others]
        for i, r in enumerate(records)
    ]
    means = [[x for x in ratios[name] if x is not None] for name in others]
    rows.append(["", "", "mean", "", *(_text(statistics.geometric_mean(x) if x else None, 3) for x in means)])
    return plain_table(["d", "mask", "q=keys", "TFLOP/s", *(x.removeprefix(f"{OURS}-") for x in others)], rows)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
