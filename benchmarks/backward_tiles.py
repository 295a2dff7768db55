"""Tiles of the Hopper backward beside each other: every one that the heuristics offer for a head_dim, and peers.

    python benchmarks/backward_tiles.py [--head-dims 64,128] [--causal | --full] [--seqlens 2048,16384]
                                        [--tiles rows128-overlap2-kept0+0,...] [--deterministic] [--no-peers]
                                        [--out results.json]

Cells, inputs, clock and checks are those of `benchmarks/attention.py backward`: tiles take turns on the same inputs in
the same run, the default first, and q's gradient is compared with a float32 truth before and after it is timed; those
of keys and values are compared with the default's before. Beside them cuDNN and FlashAttention-4, where they can be
imported. The tables give the default's TFLOP/s, and how many times as fast each of the others is.

Two to three minutes on an H200, most of them compiling. Exit code 0: timed. 1: a tile was wrong or failed. 2: no
NVIDIA GPU, or an argument that names nothing.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import dispatch
from attention_backend.heuristics.sm90_backward import BackwardTile, backward_tiles
from attention_backend.kernels import flash_bwd_sm90
from attention_backend.problem import AttentionArgs
from attention_backend.reference.gradients import Gradients
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY, Call, Contender, peer_versions
from benchmarks.attention_grid import backward_cells
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CUDNN, FA4, OURS, Make, found
from benchmarks.attention_report import Record, Report, plain_table
from benchmarks.attention_timing import compile_ahead, time_cell
from benchmarks.stopwatch import Stopwatch

SECTION = "backward"
SEQLENS = (512, 2048, 8192, 16384)
_TOLERANCE = 2e-2  # of gradients of keys and values, relative to the default's


def contenders_of(head_dim: int, only: Sequence[str] | None, *, deterministic: bool = False) -> list[Contender]:
    """The default tile, as OURS, and the others of a head_dim, or those of them that are named."""
    default, *others = backward_tiles(head_dim, head_dim)
    chosen = [tile for tile in others if only is None or str(tile) in only]
    names = {OURS: default} | {f"{OURS}-{tile}": tile for tile in chosen}
    return [Contender(name, {SECTION: _of_tile(tile, deterministic)}) for name, tile in names.items()]


def _of_tile(tile: BackwardTile, deterministic: bool) -> Make:
    def make(cell: Cell, t: Tensors) -> Call:
        right = 0 if cell.causal else -1
        args = AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=right, deterministic=deterministic)
        out, lse = dispatch.run(args)

        def gradients(tile: BackwardTile | None) -> Gradients:
            return flash_bwd_sm90.backward(args, out, lse, t.grad_out, tile=tile)

        compare(gradients(tile), gradients(None))
        return lambda: gradients(tile).dq

    return make


def compare(own: Gradients, default: Gradients) -> None:
    """Raises ValueError where gradients of keys or values are not the default tile's; NaN is not, either."""
    for name in ("dk", "dv"):
        error = _relative(getattr(own, name), getattr(default, name))
        if not error <= _TOLERANCE:
            raise ValueError(f"{name} is not the default tile's: relative difference {error:.2e}")


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def peers() -> list[Contender]:
    return [REGISTRY[name] for name in (CUDNN, FA4) if (p := REGISTRY[name].package) is None or found(p)]


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


def main(
    head_dims: Annotated[str, typer.Option(help="such as 64,128")] = "64,128",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = ",".join(
        map(str, SEQLENS)
    ),
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    tiles: Annotated[str | None, typer.Option(help="only these beside the default, by their names")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="sums that repeat bitwise")] = False,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="cuDNN and FlashAttention-4 too")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 3,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 40.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the tiles of the Hopper backward beside each other."""
    dims, names = numbers(head_dims), tiles.split(",") if tiles else None
    known = {str(tile) for dim in dims for tile in backward_tiles(dim, dim)}
    if unknown := set(names or ()) - known:
        raise typer.BadParameter(f"no tile named {sorted(unknown)}; there are {', '.join(sorted(known))}")
    cells = [
        cell
        for cell in backward_cells(dims, numbers(seqlens))
        if causal in (None, cell.causal) and cell.heads == cell.kv_heads
    ]
    if not cells:
        raise typer.BadParameter("no cell has these dimensions")
    watch = Stopwatch(require_gpu(), True, warm_up_ms, repeat_ms)
    ours = {dim: contenders_of(dim, names, deterministic=deterministic) for dim in dims}
    options = {"rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms, "deterministic": deterministic}
    report = Report(machine.facts(commit), options | {"peers": peer_versions()})
    typer.echo(str({name: report.machine[name] for name in ("gpu", "driver", "torch", "cudnn", "commit")}))
    for dim in dims:
        compile_ahead([cell for cell in cells if cell.head_dim == dim], ours[dim], watch.device)
    for cell in cells:
        racing = [*ours[cell.head_dim], *(peers() if with_peers else ())]
        report.records.append(time_cell(cell, racing, watch, rounds))
        torch.cuda.empty_cache()
        typer.echo(table(report.records[-1:]).rpartition("\n")[0])
        if out:
            report.write(out)
    for dim in dims:
        typer.echo("\n" + table([r for r in report.records if r.cell.head_dim == dim]))
    typer.echo("\n".join(report.missing()))
    results = [result for r in report.records for name, result in r.results.items() if name.startswith(OURS)]
    if any(result.ms is None for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
