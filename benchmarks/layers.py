"""The fused layers beside plain torch and torch.compile, bfloat16, a model's sizes (Llama-3.1-8B's by default).

    python benchmarks/layers.py [--rows 1,8,64,256,8192] [--out benchmarks/results/layers.json]

Each contender is 64 calls in one CUDA graph, as a decode step runs them, on inputs in turn: a time is the graph's
median over 64. Few rows lie in the L2 then, as they do in a step; 8192 rows do not. Bytes are what each formula reads
and writes at least. Plain torch and torch.compile run Hugging Face's arithmetic. Results are compared before they are
timed.

A minute on an H200, of which torch.compile takes most.

Exit code 0: timed. 1: a result of ours was wrong. 2: no NVIDIA GPU.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import layers
from attention_backend.reference import layers as reference
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.timed_layers import captured, tell

CONTENDERS = ("ours", "torch", "compiled")
CALLS = 64  # in one graph
REPLAYS = 30
EPS = 1e-5
PAGE = 64
TOLERANCE = 2e-2  # relative; bfloat16 is 4e-3
_SETS = 4  # of inputs
_BYTES = 2  # of a bfloat16

Function = Callable[..., Any]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Of a decoder layer."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    gated_width: int = 14336


@dataclass(frozen=True)
class Layer:
    """One fused layer: ours, the same in plain torch, inputs for so many rows, and the elements it must move a row."""

    name: str
    ours: Function
    plain: Function
    inputs: Callable[[int], Inputs]
    row_elements: int


@dataclass(frozen=True)
class Row:
    layer: str
    rows: int
    us: dict[str, float]  # of a call, by contender
    least_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"tb_per_s": {name: self.least_bytes / us / 1e6 for name, us in self.us.items()}}


def layers_of(sizes: Sizes, device: torch.device) -> Iterator[Layer]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    weight = normal(sizes.width)
    yield Layer(
        "rms_norm",
        lambda x: layers.rms_norm(x, weight, EPS),
        lambda x: reference.rms_norm(x, weight, EPS, False),
        lambda rows: (normal(rows, sizes.width),),
        2 * sizes.width,
    )
    yield Layer(
        "add_rms_norm",
        lambda x, residual: layers.add_rms_norm(x, residual, weight, EPS),
        lambda x, residual: (reference.rms_norm(residual + x, weight, EPS, False), residual + x),
        lambda rows: (normal(rows, sizes.width), normal(rows, sizes.width)),
        4 * sizes.width,
    )
    parts = [heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]

    def split(qkv: Tensor) -> list[Tensor]:
        return [part.unflatten(1, (-1, sizes.head_dim)) for part in qkv.split(parts, dim=1)]

    def rotary_inputs(rows: int) -> Inputs:
        pages = (-(-rows // PAGE) + 1, sizes.kv_heads, PAGE, sizes.head_dim)
        angles = torch.rand(rows, sizes.head_dim // 2, device=device) * 6.3
        slots = torch.arange(rows, device=device) + PAGE
        return normal(rows, sum(parts)), normal(*pages), normal(*pages), slots, angles.cos(), angles.sin()

    def plain_rotary(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = split(qkv)
        block, offset = slots // PAGE, slots % PAGE
        k_cache[block, :, offset] = reference.rotated(k, cos, sin)
        v_cache[block, :, offset] = v
        return reference.rotated(q, cos, sin)

    yield Layer(
        "rotary_store",
        lambda qkv, *others: layers.rotary_store(*split(qkv), *others),
        plain_rotary,
        rotary_inputs,
        2 * sum(parts),
    )
    yield Layer(
        "gated_activation",
        lambda x: layers.gated_activation(x[:, : sizes.gated_width], x[:, sizes.gated_width :], "silu"),
        lambda x: reference.gated_activation(x[:, : sizes.gated_width], x[:, sizes.gated_width :], "silu"),
        lambda rows: (normal(rows, 2 * sizes.gated_width),),
        3 * sizes.gated_width,
    )


def microseconds(function: Function, inputs: Sequence[Inputs]) -> float:
    """Of one call, in a graph of CALLS."""

    def run(calls: int) -> None:
        for call in range(calls):
            function(*inputs[call % len(inputs)])

    graph = captured(partial(run, CALLS), partial(run, len(inputs)))
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / CALLS


def wrong(layer: Layer, inputs: Inputs) -> str | None:
    """How far ours is from plain torch, if too far."""
    ours, plain = (function(*(x.clone() for x in inputs)) for function in (layer.ours, layer.plain))
    for mine, expected in zip(*((x,) if isinstance(x, Tensor) else x for x in (ours, plain)), strict=True):
        error = float((mine.float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE:  # NaN is wrong too
            return f"{layer.name} of {inputs[0].shape[0]} rows: relative error {error:.2e}"
    return None


def measure(layer: Layer, rows: int) -> Row:
    inputs = [layer.inputs(rows) for _ in range(_SETS)]
    functions = dict(zip(CONTENDERS, (layer.ours, layer.plain, torch.compile(layer.plain, dynamic=False)), strict=True))
    us = {name: microseconds(function, inputs) for name, function in functions.items()}
    return Row(layer.name, rows, us, rows * layer.row_elements * _BYTES)


def table(rows: Sequence[Row]) -> str:
    head = ("layer", "rows", *(f"{name} us" for name in CONTENDERS), "ours TB/s", "torch / ours", "compiled / ours")
    lines = [head]
    for row in rows:
        ours, torchs, compiled = (row.us[name] for name in CONTENDERS)
        times = (f"{us:.2f}" for us in (ours, torchs, compiled))
        ratios = (f"{torchs / ours:.2f}", f"{compiled / ours:.2f}")
        lines.append((row.layer, str(row.rows), *times, f"{row.least_bytes / ours / 1e6:.2f}", *ratios))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in lines)


@torch.inference_mode()
def main(
    rows: Annotated[str, typer.Option(help="rows of a call")] = "1,8,64,256,8192",
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the fused layers beside plain torch and torch.compile."""
    device, sizes = require_gpu(), Sizes()
    found: list[Row] = []
    errors: list[str] = []
    for layer in layers_of(sizes, device):
        for count in numbers(rows):
            error = wrong(layer, layer.inputs(count))
            errors += [error] if error else []
            torch.compiler.reset()  # each size is compiled for itself, and none is the ninth
            found.append(measure(layer, count))
    rows_found = [row.facts for row in found]
    content = {"machine": machine.facts(commit), "sizes": asdict(sizes), "calls": CALLS, "rows": rows_found}
    tell(content, table(found), errors, out)


if __name__ == "__main__":
    typer.run(main)
