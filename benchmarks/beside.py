"""Decodes beside a chunk of a prompt, on so many multiprocessors, over both one behind the other.

    python benchmarks/beside.py [--blocks 40,64,80,96] [--steady 0.4] [--out results.json]

bfloat16, 32 query heads on 8 key heads, head_dim 128, shuffled pages of 32 keys. A block of the decode has a
multiprocessor for itself; the chunk's blocks fill the others, and take those that it gives back. All ways run on the
same random inputs, whose results are compared first, without an L2 flush, as layers follow each other. In turns of 100
ms; with `--steady` each runs alone for so many seconds without a pause, twice, and its clock, watts and joules are read
(`benchmarks/power.py`). `attention_backend.heuristics.decode.BESIDE_SHARE` is chosen by these numbers.

Two minutes on an H200. Exit code 0: timed. 1: some disagree. 2: no NVIDIA GPU, or with --steady no nvidia-smi.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from torch import Tensor

from attention_backend.heuristics.decode import beside_blocks
from benchmarks import machine, power
from benchmarks.arguments import numbers, require_gpu, write_out
from benchmarks.few_rows import Cell as Decodes
from benchmarks.shared_keys import PAGE
from benchmarks.shared_keys import Cell as Chunk
from benchmarks.stopwatch import Stopwatch, alternate_all

IN_TURN = "in turn"
BLOCKS = "40,56,72,80,88,96,112"
KEY_HEADS, GROUP, HEAD_DIM = 8, 4, 128
_TOLERANCE = 1e-2  # relative: keys are added in another order, and outputs rounded to bfloat16
_ROUNDS = 8  # as many as ways by default, so that each comes behind each other

Results = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Ways = dict[str, Callable[[], Results]]


@dataclass(frozen=True)
class Step:
    """A chunk of `rows` behind `context` tokens, and `decodes` sequences of `keys`."""

    rows: int
    context: int
    decodes: int
    keys: int

    @property
    def chunk(self) -> Chunk:
        return Chunk(HEAD_DIM, KEY_HEADS * GROUP, KEY_HEADS, self.rows, self.context + self.rows, PAGE)

    @property
    def flops(self) -> float:
        return self.chunk.flops + 4 * HEAD_DIM * KEY_HEADS * GROUP * self.decodes * self.keys

    def ways(self, device: torch.device, blocks: list[int]) -> Ways:
        """By name, a number of blocks or IN_TURN; all compute the same."""
        from attention_backend.kernels import beside, flash_decode, flash_fwd_sm90

        few = Decodes(HEAD_DIM, KEY_HEADS, GROUP, self.decodes, self.keys, GROUP).problem(device)
        many = self.chunk.problem(device)
        at_once: Ways = {str(count): partial(beside.forward, few, many, count) for count in blocks}
        return {IN_TURN: lambda: (flash_decode.forward(few), flash_fwd_sm90.forward(many)), **at_once}


STEPS = (
    Step(249, 100_000, 8, 700),
    Step(512, 60_000, 16, 4096),
    Step(1024, 20_000, 32, 2048),
    Step(2048, 4096, 48, 8192),
    Step(4096, 4096, 48, 8192),
    Step(4096, 16_384, 16, 32_768),
)


def check(step: Step, ways: Ways) -> None:
    """Raises ArithmeticError where one disagrees."""
    wanted = [out.float() for out, _ in ways[IN_TURN]()]
    for name, call in ways.items():
        for (out, _), expected in zip(call(), wanted, strict=True):
            error = float((out.float() - expected).norm() / expected.norm())
            if not error <= _TOLERANCE:  # NaN is wrong too
                raise ArithmeticError(f"{step}: {name} is not what {IN_TURN} is: relative difference {error:.2e}")


def main(
    blocks: Annotated[str, typer.Option(help="of the decode: multiples of its 8 key heads")] = BLOCKS,
    steady: Annotated[float, typer.Option(help="seconds that each way runs alone; 0: in turns")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times decodes beside a chunk's attention by how many multiprocessors they have."""
    counts = numbers(blocks)
    watch = Stopwatch(require_gpu(), flush=False, warm_up_ms=20, repeat_ms=80)
    num_sms = torch.cuda.get_device_properties(watch.device).multi_processor_count
    if steady:
        power.require_readings()
    typer.echo(f"in turn / beside, by blocks of the decode ({beside_blocks(num_sms, KEY_HEADS)} are chosen)")
    typer.echo("rows @ context + decodes x keys   us in turn" + "".join(f"{count:8}" for count in counts))
    cells, wrong = [], False
    for step in STEPS:
        ways = step.ways(watch.device, counts)
        try:
            check(step, ways)
            loads = power.steadily(ways, step.flops, steady, watch.device) if steady else {}
            ms = {name: step.flops / load.tflops / 1e9 for name, load in loads.items()} or alternate_all(
                {name: [call] for name, call in ways.items()}, watch.times, _ROUNDS
            )
        except ArithmeticError as error:
            typer.echo(str(error))
            wrong = True
            continue
        read = {"loads": {name: asdict(load) for name, load in loads.items()}} if loads else {}
        cells.append(asdict(step) | {"flops": step.flops, "ms": ms} | read)
        typer.echo(
            f"{step.rows:5} @ {step.context:<6} + {step.decodes:2} x {step.keys:<6} {ms[IN_TURN] * 1e3:14.1f}"
            + "".join(f"{ms[IN_TURN] / ms[str(count)]:8.3f}" for count in counts)
        )
        if out:
            content = {"machine": machine.facts(commit), "flush": False, "steady": steady, "cells": cells}
            write_out(out, json.dumps(content, indent=1) + "\n")
        torch.cuda.empty_cache()
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
