"""The linear layers of a decoder's steps beside torch's, bfloat16 (Llama-3.1-8B's sizes by default).

    python benchmarks/linears.py [--rows 5,64,8192] [--sizes 4096,6144,14336] [--out benchmarks/results/linears.json]

Each contender is a CUDA graph of several layers, whose weights no cache holds: both norms, the four products, the
activation; no attention. Contenders take turns; a time is the median of its turns, over the layers. "qkv", "out",
"gate_up", "down": ours of that one alone; of many rows only gates have a kernel. Results are compared before they are
timed. Turns of thousands of rows are long enough for the card's power limit to be what it is in a long prompt.

Exit code 0: timed. 1: a result of ours was wrong. 2: no NVIDIA GPU, or sizes that are none.
"""

import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import layers, linears
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_report import plain_table
from benchmarks.timed_layers import captured, tell

LAYERS = 6
TURNS, REPLAYS = 7, 2
EPS = 1e-5
TOLERANCE = 2e-2  # relative; bfloat16 is 4e-3, and the layers add up
PRODUCTS = ("qkv", "out", "gate_up", "down")
CONTENDERS = {"torch": (), "ours": PRODUCTS, **{name: (name,) for name in PRODUCTS}}


class Weights(NamedTuple):
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Row:
    rows: int
    us: dict[str, float]  # of a layer, by contender
    weight_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"tb_per_s": {name: self.weight_bytes / us / 1e6 for name, us in self.us.items()}}


def weights_of(width: int, qkv: int, gated: int, device: torch.device) -> Weights:
    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) / columns**0.5

    norm = torch.rand(width, dtype=torch.bfloat16, device=device)
    return Weights(normal(qkv, width), normal(width, width), normal(2 * gated, width), normal(width, gated), norm)


def run(x: Tensor, residual: Tensor, model: list[Weights], ours: tuple[str, ...]) -> Tensor:
    """All layers; products that `ours` names by our kernel. Attention is left out: its queries go on."""

    def linear(name: str, x: Tensor, weight: Tensor) -> Tensor:
        return (linears.linear if name in ours else F.linear)(x, weight)

    for w in model:
        normed, residual = layers.add_rms_norm(x, residual, w.norm, EPS)
        queries = linear("qkv", normed, w.qkv)[:, : w.out.shape[1]].contiguous()
        normed, residual = layers.add_rms_norm(linear("out", queries, w.out), residual, w.norm, EPS)
        if "gate_up" in ours:
            gated = linears.gated_linear(normed, w.gate_up, "silu")
        else:
            gate, up = F.linear(normed, w.gate_up).chunk(2, dim=1)
            gated = layers.gated_activation(gate, up, "silu")
        x = linear("down", gated, w.down)
    return x + residual


def measure(rows: int, model: list[Weights]) -> tuple[Row, str | None]:
    """The times, and how far ours is from torch if too far."""
    width, device = model[0].norm.shape[0], model[0].norm.device
    x, residual = (torch.randn(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    plain, ours = (run(x, residual, model, CONTENDERS[name]).float() for name in ("torch", "ours"))
    error = float((ours - plain).norm() / plain.norm())
    calls = {name: partial(run, x, residual, model, chosen) for name, chosen in CONTENDERS.items()}
    graphs = {name: captured(call, call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / REPLAYS / len(model))
    num_bytes = sum(x.nbytes for x in model[0])
    row = Row(rows, {name: statistics.median(us) for name, us in times.items()}, num_bytes)
    return row, None if error <= TOLERANCE else f"{rows} rows: relative error {error:.2e}"


def table(found: list[Row]) -> str:
    head = ["rows", "torch us", "ours us", "torch / ours", "ours TB/s", *(f"{name} alone us" for name in PRODUCTS)]
    lines = [
        [
            str(row.rows),
            *(f"{row.us[name]:.1f}" for name in ("torch", "ours")),
            f"{row.us['torch'] / row.us['ours']:.3f}",
            f"{row.weight_bytes / row.us['ours'] / 1e6:.2f}",
            *(f"{row.us[name]:.1f}" for name in PRODUCTS),
        ]
        for row in found
    ]
    return plain_table(head, lines)


@torch.inference_mode()
def main(
    rows: Annotated[str, typer.Option(help="rows of a step")] = "5,8,16,32,64,256,384,512,640,1024,2048,4096,8192",
    sizes: Annotated[str, typer.Option(help="hidden size, queries with keys and values, MLP")] = "4096,6144,14336",
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the linear layers of steps beside torch's."""
    given = numbers(sizes)
    if len(given) != 3 or given[1] < given[0]:
        raise typer.BadParameter("three sizes, of which the second holds the queries", param_hint="--sizes")
    device = require_gpu()
    width, qkv, gated = given
    model = [weights_of(width, qkv, gated, device) for _ in range(LAYERS)]
    measured = [measure(count, model) for count in numbers(rows)]
    found, errors = [row for row, _ in measured], [error for _, error in measured if error]
    rows_found = [row.facts for row in found]
    content = {"machine": machine.facts(commit), "sizes": given, "layers": LAYERS, "rows": rows_found}
    tell(content, table(found), errors, out)


if __name__ == "__main__":
    typer.run(main)
