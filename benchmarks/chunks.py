"""Chunks of a prompt over what is in the cache: the Hopper forward's tiles of 128 and 192 rows, of one head's rows and
of a key head's group's, and pairs of those that load keys for each other, beside what is chosen, and beside keys that
are not cut into parts.

    python benchmarks/chunks.py [--rows 249,505,889] [--contexts 20000,120000] [--steady 0.4] [--out results.json]

bfloat16, 32 query heads on 8 key heads, head_dim 128, shuffled pages of 32 keys, a causal mask. A step that has decodes
beside it lasts as long as those want, so its chunk has any number of rows, fewer the deeper it is. All ways run on the
same random inputs, without an L2 flush, as layers follow each other; their outputs are compared first. Turns are of 100
ms: a prompt is read for seconds, at the device's power limit, and what takes fewer joules is faster there. Each form
has as many parts as `attention_backend.heuristics.sm90` gives it, whose constants, and those of sm90_chunks, are chosen
by these numbers. Between turns the device waits while calls are queued; with `--steady` each form runs alone for so
many seconds without a pause, twice, and its clock, watts and joules are read (`benchmarks/power.py`). What is
shorter than the host's launches of it (some 150 us) is the host's time then.

Two minutes on an H200. Exit code 0: timed. 1: some disagree. 2: no NVIDIA GPU, or with --steady no nvidia-smi.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from torch import Tensor

from attention_backend.heuristics.sm90 import ALONE, BY_ROWS
from attention_backend.problem import AttentionArgs
from benchmarks import machine, power
from benchmarks.arguments import numbers, require_gpu, write_out
from benchmarks.shared_keys import PAGE, Cell
from benchmarks.stopwatch import Stopwatch, alternate_all

ROWS = "121,200,249,320,377,505,633,761,889,1017,1273,1529,1800"
CONTEXTS = "20000,60000,120000"
CHOSEN, WHOLE = "chosen", "whole keys"
FORMS = {
    "128": (False, False, ALONE), "128 packed": (False, True, ALONE), "128 pairs": (False, True, BY_ROWS),
    "192": (True, False, ALONE), "192 packed": (True, True, ALONE), "192 pairs": (True, True, BY_ROWS),
}  # fmt: skip
_TOLERANCE = 1e-2  # relative: keys are added in another order, and outputs rounded to bfloat16
_ROUNDS = 2

Forward = Callable[[], tuple[Tensor, Tensor]]


def ways(args: AttentionArgs) -> dict[str, Forward]:
    """By name; all compute the same."""
    from attention_backend.kernels.flash_fwd_sm90 import forward

    forms: dict[str, Forward] = {
        name: partial(forward, args, cluster=cluster, own=False, tall=tall, pack=pack)
        for name, (tall, pack, cluster) in FORMS.items()
    }
    return {CHOSEN: partial(forward, args), WHOLE: partial(forward, replace(args, num_splits=1)), **forms}


def checked_ways(cell: Cell, device: torch.device) -> dict[str, Forward]:
    """Raises ArithmeticError where one disagrees."""
    calls = ways(cell.problem(device))
    outs = {name: call()[0].float() for name, call in calls.items()}
    for name, out in outs.items():
        error = float((out - outs[CHOSEN]).norm() / outs[CHOSEN].norm())
        if not error <= _TOLERANCE:  # NaN is wrong too
            raise ArithmeticError(f"{cell}: {name} is not what {CHOSEN} is: relative difference {error:.2e}")
    return calls


def measure(cell: Cell, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of each way. Raises ArithmeticError where one raises."""
    calls = checked_ways(cell, watch.device)
    return alternate_all({name: [call] for name, call in calls.items()}, watch.times, _ROUNDS)


def measure_steadily(cell: Cell, device: torch.device, seconds: float) -> dict[str, power.Load]:
    """Each way's mean of two turns, the second in the opposite order."""
    return power.steadily(checked_ways(cell, device), cell.flops, seconds, device)


def main(
    rows: Annotated[str, typer.Option(help="of the chunk")] = ROWS,
    contexts: Annotated[str, typer.Option(help="tokens before it")] = CONTEXTS,
    steady: Annotated[float, typer.Option(help="seconds that each form runs alone; 0: in turns")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the forms of the Hopper forward that may serve a chunk."""
    cells = [Cell(128, 32, 8, n, context + n, PAGE) for context in numbers(contexts) for n in numbers(rows)]
    watch = Stopwatch(require_gpu(), flush=False, warm_up_ms=20, repeat_ms=80)
    if steady:
        power.require_readings()
    results, wrong = [], False
    names = (CHOSEN, WHOLE, *FORMS)
    typer.echo("TFLOP/s    " + "".join(f"{name:>12}" for name in names) + "   / whole keys  / best form")
    for cell in cells:
        try:
            loads = measure_steadily(cell, watch.device, steady) if steady else {}
            ms = {name: cell.flops / load.tflops / 1e9 for name, load in loads.items()} or measure(cell, watch)
        except ArithmeticError as error:
            typer.echo(str(error))
            wrong = True
            continue
        read = {"loads": {name: asdict(load) for name, load in loads.items()}} if loads else {}
        results.append(asdict(cell) | {"flops": cell.flops, "ms": ms} | read)
        speeds = [cell.flops / ms[name] / 1e9 for name in names]
        typer.echo(
            f"{cell.rows:4} @ {cell.keys - cell.rows:<6}" + "".join(f"{speed:12.0f}" for speed in speeds)
            + f"{speeds[0] / speeds[1]:12.3f}{speeds[0] / max(speeds[2:]):12.3f}"
        )  # fmt: skip
        if out:
            content = {"machine": machine.facts(commit), "flush": False, "steady": steady, "cells": results}
            write_out(out, json.dumps(content, indent=1) + "\n")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
