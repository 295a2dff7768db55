"""The decode kernel beside the Hopper forward where a key head's group has some 8 to 64 query rows: a few tokens to be
verified at once, or rows of requests that share their keys.

    python benchmarks/few_rows.py [--head-dims 64,128] [--out results.json]

bfloat16 over shuffled pages of 32 keys, 8 key heads of 4 query heads and 16 of one. Both run on the same random inputs
in turn; outputs are compared before they are timed. Medians of CUDA events with the L2 flushed before each call.
`attention_backend.heuristics.decode.FEW_HOPPER_ROWS` is chosen by these numbers.

A minute on an H200. Exit code 0: timed. 1: the two disagree. 2: no NVIDIA GPU.
"""

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.problem import AttentionArgs
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu, write_out
from benchmarks.stopwatch import FLUSHED_BY, Stopwatch, alternate_all

ROWS = (8, 16, 24, 32, 48, 64)
HEADS = ((8, 4), (16, 1))  # key heads, query heads of each
CONTEXTS = ((1, 1024), (1, 8192), (1, 65536), (16, 1024), (16, 8192), (16, 32768))  # sequences, keys of each
PAGE = 32
_TOLERANCE = 2e-2  # relative
_ROUNDS = 2


@dataclass(frozen=True)
class Cell:
    """`rows`: of a key head's group."""

    head_dim: int
    key_heads: int
    group: int
    batch: int
    keys: int
    rows: int

    def problem(self, device: torch.device) -> AttentionArgs:
        pages = -(-self.keys // PAGE)
        shape = (self.batch * pages + 1, self.key_heads, PAGE, self.head_dim)
        k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
        queries = (self.batch, self.rows // self.group, self.key_heads * self.group, self.head_dim)
        return AttentionArgs(
            torch.randn(queries, device=device, dtype=torch.bfloat16),
            k,
            v,
            self.head_dim**-0.5,
            block_table=torch.randperm(shape[0], device=device)[:-1].int().view(self.batch, pages),
            seqused_k=torch.full((self.batch,), self.keys, device=device, dtype=torch.int32),
            max_seqlen_k=self.keys,
            window_right=0,
        )


def cells(head_dims: list[int]) -> list[Cell]:
    found = product(head_dims, HEADS, CONTEXTS, ROWS)
    return [Cell(dim, *heads, *context, rows) for dim, heads, context, rows in found]


def measure(cell: Cell, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of either. Raises ArithmeticError where they disagree."""
    from attention_backend.kernels import flash_decode, flash_fwd_sm90

    args = cell.problem(watch.device)
    decode, forward = flash_decode.forward(args)[0].float(), flash_fwd_sm90.forward(args)[0].float()
    error = float((decode - forward).norm() / forward.norm())
    if not error <= _TOLERANCE:
        raise ArithmeticError(f"{cell}: relative difference {error:.2e}")
    calls = {"decode": [lambda: flash_decode.forward(args)], "forward": [lambda: flash_fwd_sm90.forward(args)]}
    return alternate_all(calls, watch.times, _ROUNDS)


def main(
    head_dims: Annotated[str, typer.Option(help="only these")] = "64,128",
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the decode kernel and the Hopper forward on few rows."""
    watch = Stopwatch(require_gpu(), warm_up_ms=1, repeat_ms=10)
    rows, wrong = [], False
    typer.echo("head_dim  key heads  group  batch    keys  rows  decode us  forward us  decode / forward")
    for cell in cells(numbers(head_dims)):
        try:
            ms = measure(cell, watch)
        except ArithmeticError as error:
            typer.echo(str(error))
            wrong = True
            continue
        rows.append(asdict(cell) | {"ms": ms})
        decode, forward = ms["decode"] * 1e3, ms["forward"] * 1e3
        typer.echo(
            f"{cell.head_dim:8} {cell.key_heads:10} {cell.group:6} {cell.batch:6} {cell.keys:7} {cell.rows:5}"
            f" {decode:10.1f} {forward:11.1f} {decode / forward:10.2f}"
        )
        if out:
            content = {"machine": machine.facts(commit), "flush": FLUSHED_BY, "page": PAGE, "cells": rows}
            write_out(out, json.dumps(content, indent=1) + "\n")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
