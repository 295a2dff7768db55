"""Runs the teaching ladder of docs/ladder: every rung checked against torch, then timed.

    python benchmarks/ladder.py [--seqlen 4096] [--heads 16] [--out results.json] [--commit HASH]

Forward, bfloat16, batch 1, head_dim 128, no mask. A rung is right by FlashAttention's rule: its largest error against
float64 is at most twice that of the same formula in torch in bfloat16; its output is NaN before. Times are medians of
CUDA events with the L2 flushed before each call; TFLOP/s count 4 * heads * n * n * head_dim. The last line is the
product's kernel for the same call, which the ladder leads up to. About 15 seconds on an H200.

Exit code 0: every rung that this GPU has is right and timed. 1: a rung was wrong or failed. 2: no NVIDIA GPU.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from benchmarks import machine
from benchmarks.arguments import require_gpu
from benchmarks.ladder_rungs import HEAD_DIM, RUNGS, TILE, Rung, make
from benchmarks.stopwatch import Stopwatch

PRODUCT = "product"
_ROUNDING = 1e-5  # allowed beside twice torch's error


@dataclass(frozen=True)
class Step:
    """A line of the result: a rung or the product, with its time or the reason why there is none."""

    name: str
    idea: str
    needs: str
    heads: int
    seqlen: int
    ms: float | None = None
    reason: str | None = None
    error: float | None = None  # max |out - float64|
    torch_error: float | None = None
    scores_bytes: int = 0  # that it keeps in global memory
    wrong: bool = False

    @property
    def tflops(self) -> float | None:
        return 4 * self.heads * self.seqlen**2 * HEAD_DIM / self.ms / 1e9 if self.ms else None

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"tflops": self.tflops}


def largest_error(out: Tensor, truth: Tensor) -> float:
    """max |out - truth|, infinite when `out` has a NaN."""
    error = (out.double() - truth).abs().max().item()
    return math.inf if math.isnan(error) else error


def errors(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[float, float]:
    """The largest error against float64 of `out` and of the formula in torch in the tensors' dtype, head by head."""
    ours, theirs = [], []
    for head in range(q.shape[0]):
        same = [x[head] for x in (q, k, v)]
        truth = standard(*(x.double() for x in same))
        ours.append(largest_error(out[head], truth))
        theirs.append(largest_error(standard(*same), truth))
    return max(ours), max(theirs)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def climb(step: Step, prepare: Callable[[], Callable[[], Tensor]], tensors: Sequence[Tensor], watch: Stopwatch) -> Step:
    """The step with its time, or with what is wrong."""
    q, k, v = tensors
    try:
        call = prepare()
        error, torch_error = errors(q, k, v, call())
        right = error <= 2 * torch_error + _ROUNDING
        facts = asdict(step) | {"error": error if math.isfinite(error) else None, "torch_error": torch_error}
        if not right:
            reason = f"wrong: largest error {error:.2e}, torch in bfloat16 {torch_error:.2e}"
            return Step(**facts | {"reason": reason, "wrong": True})
        return Step(**facts | {"ms": statistics.median(watch.times([call]))})
    except Exception as failure:  # its reason stands in the table, and the exit code is 1
        text = str(failure).strip().splitlines()
        reason = f"{type(failure).__name__}: {text[0][:160] if text else 'no message'}"
        return Step(**asdict(step) | {"reason": reason, "wrong": True})


def climb_rung(rung: Rung, tensors: Sequence[Tensor], watch: Stopwatch) -> Step:
    q, k, v = tensors
    heads, n, _ = q.shape
    needs = f"{rung.arch} only" if rung.arch.endswith("a") else f"{rung.arch} and later"
    step = Step(rung.name, rung.idea, needs, heads, n, scores_bytes=4 * heads * n * n if rung.scores else 0)
    if not rung.runs_on(torch.cuda.get_device_capability(q.device)):
        return Step(**asdict(step) | {"reason": f"needs {needs}"})
    return climb(step, lambda: make(rung, q, k, v, torch.full_like(q, torch.nan)), tensors, watch)


def climb_product(tensors: Sequence[Tensor], watch: Stopwatch) -> Step:
    """What dispatch chooses for the same tensors, handed in as `[1, n, heads, head_dim]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    args = AttentionArgs(q, k, v, HEAD_DIM**-0.5)
    step = Step(PRODUCT, dispatch.select(args).kernel, "any", *tensors[0].shape[:2])
    return climb(step, lambda: lambda: dispatch.run(args)[0][0].transpose(0, 1), tensors, watch)


def table(steps: Sequence[Step]) -> str:
    """Markdown: TFLOP/s, the share of the best rung, and the factor over the rung before."""
    best = max((s.tflops for s in steps if s.tflops and s.name != PRODUCT), default=math.nan)
    lines = ["| rung | adds | needs | ms | TFLOP/s | of the best | scores in memory |", "|---|---|---|---|---|---|---|"]
    for s in steps:
        if s.tflops is None:
            lines.append(f"| {s.name} | {s.idea} | {s.needs} | - | - | {s.reason} | |")
            continue
        memory = f"{s.scores_bytes / 1e9:.2f} GB" if s.scores_bytes else "none"
        cells = (s.name, s.idea, s.needs, f"{s.ms:.3f}", f"{s.tflops:.1f}", f"{s.tflops / best:.1%}", memory)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    seqlen: Annotated[int, typer.Option(help="a multiple of 128")] = 4096,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Runs the rungs of docs/ladder and says how fast each is."""
    if seqlen < TILE or seqlen % TILE:
        raise typer.BadParameter(f"--seqlen {seqlen} is not a multiple of {TILE}")
    device = require_gpu()
    facts = machine.facts(commit)
    typer.echo(f"{ {name: facts[name] for name in ('gpu', 'driver', 'torch', 'cuda', 'commit')} }")
    tensors = [torch.randn(heads, seqlen, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(3)]
    watch = Stopwatch(device, warm_up_ms=5, repeat_ms=20)
    steps = []
    for rung in RUNGS:
        steps.append(climb_rung(rung, tensors, watch))
        torch.cuda.empty_cache()
        typer.echo(f"{rung.name}: {steps[-1].reason or f'{steps[-1].ms:.3f} ms'}")
    steps.append(climb_product(tensors, watch))
    typer.echo(table(steps))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": facts, "head_dim": HEAD_DIM, "steps": [s.facts() for s in steps]}
        out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if any(s.wrong for s in steps):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
