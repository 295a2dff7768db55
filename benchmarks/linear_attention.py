"""Linear attention's cost over the length, beside softmax attention's: both ours, batch 1, 16 heads, bfloat16.

    python benchmarks/linear_attention.py [--head-dims 64,128] [--seqlens 1024,65536] [--out results.json]

Results of linear attention are checked against the formula in float32 before they are timed. The two take turns on the
same random inputs; a time is the median of CUDA-event timings with the L2 flushed before each call. Bytes are the
least there are: queries, keys and values read once, outputs written once; of a causal call over several segments the
kernels read keys and values twice. FLOPs are what the full formulas need (softmax: halved under a causal mask).

Under a minute on an H200, kernels cold.

Exit code 0: timed. 1: a result of ours was wrong or missing. 2: no NVIDIA GPU.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import flash_attn_func
from attention_backend.linear import linear_attention
from attention_backend.reference import linear as reference
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.stopwatch import FLUSHED_BY, Call, Stopwatch, alternate, copy_bandwidth

SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEAD_DIMS = (64, 128)
HEADS = 16
LINEAR, SOFTMAX = "linear", "softmax"
TOLERANCE = 2e-2  # relative; bfloat16 features, weights and states alone are about 3e-3
_REFERENCE_CHUNK = 1024
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Cell:
    """One problem: q, k and v `[1, seqlen, heads, head_dim]`."""

    head_dim: int
    causal: bool
    seqlen: int
    heads: int = HEADS

    @property
    def least_bytes(self) -> int:
        return 4 * self.seqlen * self.heads * self.head_dim * _BYTES

    def flops(self, name: str) -> int:
        """Two products a token with a state of head_dim^2, or two a pair of tokens with head_dim elements."""
        if name == LINEAR:
            return 4 * self.heads * self.seqlen * self.head_dim**2
        pairs = self.seqlen * self.seqlen // (2 if self.causal else 1)
        return 4 * self.heads * pairs * self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"


@dataclass(frozen=True)
class Row:
    """What was measured of a cell: milliseconds, or the reason why there are none."""

    cell: Cell
    ms: Mapping[str, float]
    reasons: Mapping[str, str]
    error: float | None  # of linear attention, relative

    def facts(self) -> dict[str, Any]:
        results = {
            name: {"ms": ms, "tflops": self.cell.flops(name) / ms / 1e9, "tb_per_s": self.cell.least_bytes / ms / 1e9}
            for name, ms in self.ms.items()
        }
        counted = {"least_bytes": self.cell.least_bytes, "linear_flops": self.cell.flops(LINEAR)}
        return {
            **asdict(self.cell),
            **counted,
            "results": results,
            "missing": dict(self.reasons),
            "relative_error": self.error if self.error is None or math.isfinite(self.error) else None,
        }


@dataclass
class Report:
    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    copy_tb_per_s: float
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        content = {
            "machine": dict(self.machine),
            "options": dict(self.options),
            "copy_tb_per_s": self.copy_tb_per_s,
            "cheaper_from": [
                {"head_dim": head_dim, "mask": mask, "seqlen": seqlen}
                for (head_dim, mask), seqlen in self.cheaper_from().items()
            ],
            "cells": [row.facts() for row in self.rows],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def cheaper_from(self) -> dict[tuple[int, str], int | None]:
        """By head_dim and mask: the length from which on linear attention takes less time at every length measured."""
        found: dict[tuple[int, str], int | None] = {}
        for row in sorted(self.rows, key=lambda r: -r.cell.seqlen):
            key = (row.cell.head_dim, row.cell.mask)
            found.setdefault(key, None)
            lost = any(r.cell.seqlen > row.cell.seqlen and not _cheaper(r) for r in self._like(row))
            if _cheaper(row) and not lost:
                found[key] = row.cell.seqlen
        return found

    def _like(self, row: Row) -> Iterator[Row]:
        return (r for r in self.rows if (r.cell.head_dim, r.cell.causal) == (row.cell.head_dim, row.cell.causal))

    def table(self) -> str:
        head = ("d", "mask", "tokens", "linear ms", "TB/s", "of copy", "softmax ms", "TFLOP/s", "softmax / linear")
        lines = [head, *(self._line(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in lines)

    def _line(self, row: Row) -> tuple[str, ...]:
        cell, linear, softmax = row.cell, row.ms.get(LINEAR), row.ms.get(SOFTMAX)
        rate = cell.least_bytes / linear / 1e9 if linear else None
        return (
            str(cell.head_dim),
            cell.mask,
            str(cell.seqlen),
            _text(linear, 4),
            _text(rate, 2),
            _text(rate / self.copy_tb_per_s if rate else None, 2),
            _text(softmax, 4),
            _text(cell.flops(SOFTMAX) / softmax / 1e9 if softmax else None, 1),
            _text(softmax / linear if linear and softmax else None, 2),
        )


def _cheaper(row: Row) -> bool:
    linear, softmax = row.ms.get(LINEAR), row.ms.get(SOFTMAX)
    return linear is not None and softmax is not None and linear < softmax


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def cells(head_dims: Sequence[int], seqlens: Sequence[int]) -> list[Cell]:
    return [Cell(d, causal, n) for d, causal, n in product(head_dims, (False, True), seqlens)]


def relative_error(cell: Cell, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """|out - truth| / |truth| (Frobenius) with the truth in float32; NaN when `out` has one."""
    truth = reference.forward(q.float(), k.float(), v.float(), causal=cell.causal, chunk_size=_REFERENCE_CHUNK)
    return float((out.float() - truth).norm() / truth.norm())


def measure(cell: Cell, watch: Stopwatch, rounds: int) -> Row:
    shape = (1, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=watch.device) for _ in range(3))
    calls: dict[str, list[Call]] = {
        LINEAR: [lambda: linear_attention(q, k, v, causal=cell.causal)],
        SOFTMAX: [lambda: flash_attn_func(q, k, v, causal=cell.causal)],
    }
    reasons: dict[str, str] = {}
    error: float | None = None
    try:
        error = relative_error(cell, q, k, v, linear_attention(q, k, v, causal=cell.causal))
        if not error <= TOLERANCE:  # NaN is wrong too
            reasons[LINEAR] = f"wrong result: relative error {error:.2e}"
    except Exception as failure:  # whatever stops it is its reason in the record
        reasons[LINEAR] = f"{type(failure).__name__}: {failure}"
    if LINEAR in reasons:
        del calls[LINEAR]
    medians = alternate(calls, watch.times, rounds)
    times = {name: x for name, x in medians.items() if not isinstance(x, Exception)}
    reasons |= {name: f"{type(x).__name__}: {x}" for name, x in medians.items() if isinstance(x, Exception)}
    return Row(cell, times, reasons, error)


def main(
    head_dims: Annotated[str, typer.Option(help="only these")] = ",".join(map(str, HEAD_DIMS)),
    seqlens: Annotated[str, typer.Option(help="only these lengths")] = ",".join(map(str, SEQLENS)),
    rounds: Annotated[int, typer.Option(min=1, help="turns of either")] = 2,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times linear attention beside softmax attention over the length."""
    chosen = cells(numbers(head_dims), numbers(seqlens))
    watch = Stopwatch(require_gpu())
    options = {"rounds": rounds, "flush": watch.flush and FLUSHED_BY, "repeat_ms": watch.repeat_ms}
    report = Report(machine.facts(commit), options, copy_bandwidth(watch))
    for cell in chosen:
        report.rows.append(measure(cell, watch, rounds))
        torch.cuda.empty_cache()
        if out:
            report.write(out)
    typer.echo(f"{report.machine['gpu']}, copy {report.copy_tb_per_s:.2f} TB/s (read + write)\n{report.table()}")
    for (head_dim, mask), seqlen in report.cheaper_from().items():
        typer.echo(f"d={head_dim} {mask}: linear attention is faster from {seqlen or 'no measured length'} on")
    missing = [f"{row.cell}: {name}: {reason}" for row in report.rows for name, reason in row.reasons.items()]
    typer.echo("\n".join(missing), nl=bool(missing))
    if missing:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
