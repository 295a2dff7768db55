"""The Hopper forward whose blocks load keys for each other beside the one whose blocks load for themselves, where the
device is as busy as in a long prefill.

    python benchmarks/shared_keys.py [--out results.json]

bfloat16. Chunks of prompts over shuffled pages of 32 keys under a causal mask, as the engine runs them (32 query heads
on 8 key heads and on 32, head_dim 128; 16 on 4, head_dim 256), and whole prompts over contiguous keys. Both ways run on
the same random inputs in turns of 60 ms, after 20 ms to get as warm, without an L2 flush: it is energy that sharing
saves, so a device that rests between calls does not show it. Outputs must be the same, bit for bit: the same products
are added in the same order. `attention_backend.heuristics.sm90.shares_keys_from` is chosen by these numbers.

A minute on an H200. Exit code 0: timed. 1: the two disagree. 2: no NVIDIA GPU.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.heuristics.sm90 import ALONE, shares_keys_from
from attention_backend.problem import AttentionArgs
from benchmarks import machine
from benchmarks.arguments import require_gpu, write_out
from benchmarks.stopwatch import Stopwatch, alternate_all

HEADS = ((128, 32, 8), (128, 32, 32), (256, 16, 4))  # head_dim, query heads, key heads
KEYS = (4096, 8192, 16_384, 32_768, 131_072)
ROWS = (1024, 2048, 8192)
PAGE = 32
_LONGEST_WHOLE = 32_768
_ROUNDS = 4


@dataclass(frozen=True)
class Cell:
    """The last `rows` rows of a prompt of `keys` tokens. `page` 0: contiguous keys."""

    head_dim: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    page: int
    causal: bool = True

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def flops(self) -> float:
        seen = self.keys - self.rows / 2 if self.causal else self.keys
        return 4 * self.heads * self.head_dim * self.rows * seen

    def problem(self, device: torch.device) -> AttentionArgs:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        q, scale = normal(1, self.rows, self.heads, self.head_dim), self.head_dim**-0.5
        right = 0 if self.causal else -1
        if not self.page:
            k, v = (normal(1, self.keys, self.key_heads, self.head_dim) for _ in "kv")
            return AttentionArgs(q, k, v, scale, window_right=right)
        pages = -(-self.keys // self.page)
        k, v = (normal(pages + 1, self.key_heads, self.page, self.head_dim).transpose(1, 2) for _ in "kv")
        return AttentionArgs(
            q,
            k,
            v,
            scale,
            block_table=torch.randperm(pages + 1, device=device)[:-1].int()[None],
            seqused_k=torch.full((1,), self.keys, device=device, dtype=torch.int32),
            max_seqlen_k=self.keys,
            window_right=right,
        )


def cells() -> Iterator[Cell]:
    for heads in HEADS:
        yield from (Cell(*heads, rows, keys, PAGE) for keys in KEYS for rows in ROWS if rows <= keys)
        for causal in (True, False):
            yield from (Cell(*heads, keys, keys, 0, causal) for keys in KEYS if keys <= _LONGEST_WHOLE)


def measure(cell: Cell, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of either way. Raises ArithmeticError where they disagree."""
    from attention_backend.kernels.flash_fwd_sm90 import forward

    shared = shares_keys_from(cell.head_dim, cell.group, causal=cell.causal)
    assert shared is not None, "a head_dim whose blocks load keys for each other"
    args = cell.problem(watch.device)
    ways = {"alone": ALONE, "shared": shared[0]}
    alone, together = (forward(args, cluster=way) for way in ways.values())
    if not all(torch.equal(x, y) for x, y in zip(alone, together, strict=True)):
        raise ArithmeticError(f"{cell}: not the same bits")
    calls = {name: [partial(forward, args, cluster=way)] for name, way in ways.items()}
    return alternate_all(calls, watch.times, _ROUNDS)


def main(
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the Hopper forward with and without blocks that load keys for each other."""
    watch = Stopwatch(require_gpu(), flush=False, warm_up_ms=20, repeat_ms=60)
    rows, wrong = [], False
    typer.echo("head_dim  heads   rows    keys  page  causal  alone TFLOP/s  shared  alone / shared")
    for cell in cells():
        try:
            ms = measure(cell, watch)
        except ArithmeticError as error:
            typer.echo(str(error))
            wrong = True
            continue
        torch.cuda.empty_cache()
        rows.append(asdict(cell) | {"flops": cell.flops, "ms": ms})
        alone, shared = (cell.flops / ms[name] / 1e9 for name in ("alone", "shared"))
        typer.echo(
            f"{cell.head_dim:8} {cell.heads:3}/{cell.key_heads:<2} {cell.rows:6} {cell.keys:7} {cell.page:5}"
            f" {cell.causal!s:>7} {alone:14.0f} {shared:7.0f} {shared / alone:10.3f}"
        )
        if out:
            content = {"machine": machine.facts(commit), "flush": False, "cells": rows}
            write_out(out, json.dumps(content, indent=1) + "\n")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
