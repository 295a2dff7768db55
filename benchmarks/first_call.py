"""How long the first call of an attention variant takes in a fresh process: kernel cache cold, then warm.

    python benchmarks/first_call.py [--only decode,paged] [--rounds 1] [--out results.json]

Every number is of a process of its own, in which torch, CUDA and the inputs are ready before the clock starts, and
stops when the result is. Cold: an empty cache directory, so the call loads CuPy and compiles; warm: the directory that
the process before left.

About five seconds a process, two processes a variant and round: a minute on an H200.

Exit code 0: timed (goals may be missed). 1: a process failed. 2: no NVIDIA GPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import flash_attn_func, flash_attn_with_kvcache
from benchmarks import machine
from benchmarks.arguments import require_gpu
from benchmarks.attention_goal import Goal, Rule

COLD_GOAL_MS, WARM_GOAL_MS = 2000.0, 50.0
CACHE_VARIABLE, IMAGE_VARIABLE = "LONGWAVE_CACHE_DIR", "LONGWAVE_KERNEL_IMAGE_DIR"
HEADS, KV_HEADS = 32, 8
PAGE, CONTEXT = 64, 8192
_TIMEOUT_SECONDS = 120.0

Call = Callable[[], object]


def forward(head_dim: int, device: torch.device) -> Call:
    q, k, v = (random((1, 2048, heads, head_dim), device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return lambda: flash_attn_func(q, k, v, causal=True)


def paged(rows: int, device: torch.device) -> Call:
    """`rows` new tokens behind a context in pages; one is a decode."""
    q = random((4, rows, HEADS, 128), device)
    blocks = 4 * CONTEXT // PAGE
    k, v = (random((blocks, KV_HEADS, PAGE, 128), device).transpose(1, 2) for _ in range(2))
    table = torch.randperm(blocks, device=device).to(torch.int32).view(4, -1)
    lengths = torch.full((4,), CONTEXT, dtype=torch.int32, device=device)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)


def random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


#: Name -> the call, its inputs made.
VARIANTS: Mapping[str, Callable[[torch.device], Call]] = {
    "forward d=64": lambda device: forward(64, device),
    "forward d=128": lambda device: forward(128, device),
    "forward d=256": lambda device: forward(256, device),
    "decode": lambda device: paged(1, device),
    "paged": lambda device: paged(512, device),
}


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one process."""

    call_ms: float  # the first call
    second_ms: float


@dataclass(frozen=True)
class Row:
    """One variant: a sample per round, or why there is none."""

    name: str
    cold: Sequence[Sample] = ()
    warm: Sequence[Sample] = ()
    failure: str | None = None


@dataclass
class Report:
    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Report":
        content = json.loads(path.read_text())
        rows = [
            Row(
                row["name"],
                cold=tuple(Sample(**sample) for sample in row["cold"]),
                warm=tuple(Sample(**sample) for sample in row["warm"]),
                failure=row["failure"],
            )
            for row in content["variants"]
        ]
        return cls(content["machine"], rows)

    def goals(self) -> list[Goal]:
        """Of the first calls that were timed, with an empty cache and with a full one."""
        rows = [row for row in self.rows if row.failure is None]
        names = [row.name for row in rows]
        cold, warm = [median(row.cold).call_ms for row in rows], [median(row.warm).call_ms for row in rows]
        return [
            Goal("first call, kernels to be compiled, ms", COLD_GOAL_MS, cold, names, Rule.AT_MOST),
            Goal("first call, kernels in the cache, ms", WARM_GOAL_MS, warm, names, Rule.AT_MOST),
        ]

    def met(self) -> bool | None:
        """Whether every variant is within both goals; None when one was not timed."""
        if any(row.failure for row in self.rows) or not self.rows:
            return None
        return all(goal.met for goal in self.goals())

    def write(self, path: Path) -> None:
        content = {
            "machine": dict(self.machine),
            "goals": {"cold_ms": COLD_GOAL_MS, "warm_ms": WARM_GOAL_MS, "met": self.met()},
            "variants": [asdict(row) for row in self.rows],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def table(self) -> str:
        head = ("first call, ms", "cold", "warm", "second call")
        lines = [head, *(_line(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in lines)


def median(samples: Sequence[Sample]) -> Sample:
    """Of each number by itself."""
    return Sample(*(statistics.median(getattr(s, name) for s in samples) for name in Sample.__dataclass_fields__))


def _line(row: Row) -> tuple[str, ...]:
    if row.failure:
        return (row.name, "-", "-", "-")
    cold, warm = median(row.cold), median(row.warm)
    times = (cold.call_ms, warm.call_ms, warm.second_ms)
    return (row.name, *(f"{x:.1f}" for x in times))


def in_this_process(name: str) -> Sample:
    """The first call, timed here and now; the process must be fresh."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    call = VARIANTS[name](device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.mm(*(torch.ones((64, 64), device=device) for _ in range(2)))  # torch and CUDA are ready
    wait()
    times = [milliseconds(lambda: (call(), wait())) for _ in range(2)]
    return Sample(*times)


def milliseconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def in_fresh_process(name: str, cache: Path) -> Sample:
    """Raises RuntimeError with what the process said when it fails."""
    environment = {key: value for key, value in os.environ.items() if key != IMAGE_VARIABLE}
    environment[CACHE_VARIABLE] = str(cache)
    command = [sys.executable, str(Path(__file__).resolve()), "--in-this-process", name]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no result within {_TIMEOUT_SECONDS:.0f} s") from error
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, rounds: int, run: Callable[[str, Path], Sample] = in_fresh_process) -> Row:
    """Per round a cold and then a warm process, sharing a directory that is new each round."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="first-call-") as folder:
            try:
                cold.append(run(name, Path(folder)))
                warm.append(run(name, Path(folder)))
            except RuntimeError as error:
                return Row(name, failure=str(error))
    return Row(name, tuple(cold), tuple(warm))


def main(
    only: Annotated[str | None, typer.Option(help=f"some of {', '.join(VARIANTS)}, with commas between")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="a cold and a warm process each")] = 1,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
    here: Annotated[str | None, typer.Option("--in-this-process", hidden=True)] = None,
) -> None:
    """Times first calls in fresh processes, with a cold and a warm kernel cache."""
    if here:
        typer.echo(json.dumps(asdict(in_this_process(here))))
        return
    names = only.split(",") if only else list(VARIANTS)
    if unknown := set(names) - set(VARIANTS):
        raise typer.BadParameter(f"no variant named {sorted(unknown)}: there are {', '.join(VARIANTS)}")
    require_gpu()
    report = Report(machine.facts(commit))
    for name in names:
        report.rows.append(measure(name, rounds))
        if out:
            report.write(out)
    typer.echo(report.table())
    for row in report.rows:
        if row.failure:
            typer.echo(f"{row.name}: {row.failure}")
    verdict = {True: "met", False: "MISSED", None: "not measured"}[report.met()]
    typer.echo(f"cold <= {COLD_GOAL_MS:.0f} ms and warm <= {WARM_GOAL_MS:.0f} ms: {verdict}")
    if any(row.failure for row in report.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
