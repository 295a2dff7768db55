"""Linear layers with few rows, as decode steps have them: ours beside torch's (cuBLAS), against the memory's bandwidth.

    python benchmarks/skinny_linear.py [--rows 1,2,4,8,16] [--variants table,late] [--layers 32] [--out results.json]

The five weights of a Llama of 8 billion parameters, bfloat16. A time is the median of replays of a CUDA graph whose
launches go through copies of the weight that no L2 holds, divided by its launches. The chain is the linears of a whole
decode step, each reading what the one before wrote, over distinct layers and the output head; "with gaps" has torch's
SiLU before each. TB/s count the weight once. Outputs are compared with torch's before they are timed.

Under a minute on an H200, kernels cold. Exit code 0: timed. 1: a result of ours was wrong. 2: no NVIDIA GPU.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.heuristics.skinny import COLUMNS, LINES, MAX_ROWS, REGISTERS, SkinnyConfig
from attention_backend.jit import arch_for, build_variants, default_cache
from attention_backend.kernels import skinny_linear
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu

Linear = Callable[[Tensor, Tensor], Tensor]

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
WEIGHTS = {  # name -> [n, k]
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
}
LAYER = ("qkv", "o", "gate_up", "down")
TORCH = "torch"
TOLERANCE = 5e-2  # of outputs within +-8, whose last bit may be 0.031
_ROTATED_BYTES = 400 << 20  # several times any L2
_REPLAYS = 7


@dataclass(frozen=True)
class Variant:
    """A configuration of ours (None: what the heuristics choose), and whether it may start early."""

    config: SkinnyConfig | None = None
    early: bool = True

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return skinny_linear.linear(x, weight, None, early=self.early, config=self.config)


def _variants() -> dict[str, Variant]:
    """`table` is what the heuristics choose, `late` the same without an early start; the rest name a configuration."""
    shapes = ((2, 2, 4), (2, 2, 6), (4, 1, 12), (4, 2, 6), (6, 2, 4), (8, 2, 4), (14, 1, 12), (14, 2, 4), (14, 2, 6))
    configs = {f"ring{t}.{group}.{slots}": SkinnyConfig(t, group, slots) for t, group, slots in shapes}
    configs["deep2"] = SkinnyConfig(2, 2, 12, blocks_per_sm=1)  # 192 KB in flight, no room for the next block
    configs["deep14"] = SkinnyConfig(14, 2, 12, blocks_per_sm=1)
    for name, shape in (("line2", (2, 2, 3)), ("line4", (4, 1, 6)), ("line8", (8, 1, 6)), ("line14", (14, 1, 6))):
        configs[name] = SkinnyConfig(*shape, ring=LINES)
    for name, shape in (("reg2", (2, 2, 4)), ("reg4", (4, 2, 4))):
        configs[name] = SkinnyConfig(*shape, ring=REGISTERS, blocks_per_sm=1)
    for kib in (0, 192, 384):
        configs[f"ahead{kib}"] = SkinnyConfig(14, 2, 6, prefetch=kib << 10)
    named = {name: Variant(config) for name, config in configs.items()}
    return {"table": Variant(), "late": Variant(early=False)} | named


VARIANTS = _variants()


def compile_ahead(variants: Sequence[Variant], device: torch.device) -> None:
    """On all cores; the heuristics' own are found compiled, or compiled as they are met."""
    arch = arch_for(torch.cuda.get_device_capability(device))
    configs = [variant.config for variant in variants if variant.config is not None]
    kernels = [skinny_linear.skinny_variant(torch.bfloat16, c, config, arch) for config in configs for c in COLUMNS]
    build_variants([*kernels, *skinny_linear.covering_set(arch)], default_cache())


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()  # compiles, loads, and lets cuBLAS choose
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@dataclass(frozen=True)
class Row:
    """One weight at one number of rows: microseconds of each contender, and its largest error."""

    weight: str
    m: int
    us: Mapping[str, float]
    errors: Mapping[str, float]

    @property
    def num_bytes(self) -> int:
        n, k = WEIGHTS[self.weight]
        return 2 * n * k

    def facts(self) -> dict[str, Any]:
        rates = {name: round(self.num_bytes / us / 1e6, 3) for name, us in self.us.items()}
        return {"weight": self.weight, "m": self.m, "us": dict(self.us), "tb_per_s": rates, "errors": dict(self.errors)}


def measure(name: str, rows: Sequence[int], contenders: Mapping[str, Linear], device: torch.device) -> list[Row]:
    n, k = WEIGHTS[name]
    copies = max(2, -(-_ROTATED_BYTES // (2 * n * k)))
    weights = torch.empty((copies, n, k), dtype=torch.bfloat16, device=device).normal_(0, k**-0.5)
    launches = [weights[i % copies] for i in range(max(copies, 4 if name == "lm_head" else 16))]
    measured = []
    for m in rows:
        x = torch.randn((m, k), dtype=torch.bfloat16, device=device)
        want = F.linear(x, weights[0]).float()
        us, errors = {}, {}
        for contender, linear in contenders.items():
            errors[contender] = (linear(x, weights[0]).float() - want).abs().max().item()
            graph = captured(partial(_through, linear, x, launches))
            us[contender] = round(1e3 * milliseconds(graph) / len(launches), 2)
            del graph
        measured.append(Row(name, m, us, errors))
    return measured


def _through(linear: Linear, x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        linear(x, weight)


def measure_chain(
    rows: Sequence[int], layers: int, contenders: Mapping[str, Linear], device: torch.device
) -> list[dict[str, Any]]:
    """Milliseconds of all linears of a decode step."""
    weights = [
        {name: torch.empty(WEIGHTS[name], dtype=torch.bfloat16, device=device).normal_(0, 0.02) for name in LAYER}
        for _ in range(layers)
    ]
    head = torch.empty(WEIGHTS["lm_head"], dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    num_bytes = 2 * (sum(w.numel() for layer in weights for w in layer.values()) + head.numel())
    found = []
    for m in rows:
        x = torch.randn((m, HIDDEN), dtype=torch.bfloat16, device=device)
        for gaps in (False, True):
            ms = {
                name: milliseconds(captured(partial(_step, f, x, weights, head, gaps)))
                for name, f in contenders.items()
            }
            found.append({"m": m, "layers": layers, "gaps": gaps, "bytes": num_bytes, "ms": ms})
    return found


def _step(linear: Linear, x: Tensor, layers: Sequence[Mapping[str, Tensor]], head: Tensor, gaps: bool) -> Tensor:
    for weights in layers:
        for name in LAYER:
            x = x[:, : WEIGHTS[name][1]]
            x = linear(F.silu(x) if gaps else x, weights[name])
    return linear(x, head)


def show(rows: Sequence[Row], chains: Sequence[Mapping[str, Any]]) -> None:
    names = list(rows[0].us) if rows else []
    typer.echo(f"{'us':>8} {'m':>3} " + " ".join(f"{name:>10}" for name in names) + "   best of ours, TB/s, x torch")
    for row in rows:
        best = min((name for name in names if name != TORCH), key=row.us.__getitem__)
        rate = row.num_bytes / row.us[best] / 1e6
        times = " ".join(f"{row.us[name]:10.2f}" for name in names)
        typer.echo(f"{row.weight:>8} {row.m:>3} {times}   {best} {rate:.2f} {row.us[TORCH] / row.us[best]:.2f}")
    for chain in chains:
        what = f"{chain['layers']} layers and head, m = {chain['m']}" + (", with gaps" if chain["gaps"] else "")
        best = min(chain["ms"], key=chain["ms"].__getitem__)
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in chain["ms"].items())
        typer.echo(f"chain of {what}: {times} ms ({best}: {chain['bytes'] / chain['ms'][best] / 1e9:.2f} TB/s)")


def main(
    rows: Annotated[str, typer.Option(help="rows of x, each 1 to 16")] = "1,2,4,8,16",
    variants: Annotated[
        str, typer.Option(help="of ours: " + ", ".join(VARIANTS))
    ] = "table,late,ring2.2.6,line2,line14,reg4",
    layers: Annotated[int, typer.Option(help="of the chain; 0: no chain")] = 32,
    chain_rows: Annotated[str, typer.Option(help="rows of x in the chain")] = "1,8",
    chain_variants: Annotated[str, typer.Option(help="of ours, in the chain")] = "table,late",
    out: Annotated[Path | None, typer.Option(help="write the results there, as JSON")] = None,
) -> None:
    """Linear layers with few rows."""
    device = require_gpu()
    chosen, chained = ({TORCH: F.linear} | {n: VARIANTS[n] for n in v.split(",")} for v in (variants, chain_variants))
    ms, chain_ms = numbers(rows), numbers(chain_rows)
    compile_ahead([VARIANTS[n] for n in (*variants.split(","), *chain_variants.split(","))], device)
    if max((*ms, *chain_ms)) > MAX_ROWS:
        raise typer.BadParameter(f"ours takes up to {MAX_ROWS} rows")
    measured = [row for name in WEIGHTS for row in measure(name, ms, chosen, device)]
    chains = measure_chain(chain_ms, layers, chained, device) if layers else []
    show(measured, chains)
    if out is not None:
        found = {"machine": machine.facts(), "rows": [row.facts() for row in measured], "chains": chains}
        out.write_text(json.dumps(found, indent=1) + "\n")
    wrong = {(r.weight, r.m, n): e for r in measured for n, e in r.errors.items() if not e <= TOLERANCE}
    if wrong:
        typer.echo(f"wrong: {wrong}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
