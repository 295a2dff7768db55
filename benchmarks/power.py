"""What a GPU's power limit makes of a kernel: its speed, clock, watts and joules under steady load.

    python benchmarks/power.py forward [--head-dims 128] [--seqlens 2048,16384] [--causal | --full]
                                       [--only longwave,cudnn] [--seconds 1.5] [--out results.json]
    python benchmarks/power.py backward ...

Cells, inputs and contenders are those of `benchmarks/attention.py forward` and `backward`; of the backward all tiles of
the head_dim run, too. Each contender runs alone for some seconds without a pause; clock and power are what nvidia-smi
reads in the second half of them. A kernel at the limit is as fast as its energy lets it be: fewer cycles are no faster
where they take as many joules. Cycles are those of an SM for a million operations of it, so that orders of the same
products can be compared by them.

Two seconds a contender and cell, once compiled. Exit code 0: measured. 2: no NVIDIA GPU, no nvidia-smi, or an argument
that names nothing.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import backward_tiles, machine
from benchmarks.arguments import numbers, require_gpu, write_out
from benchmarks.attention_contenders import REGISTRY
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import OURS, Contender
from benchmarks.attention_report import plain_table
from benchmarks.checkouts import CELLS, PEERS, Section
from benchmarks.tile_race import peers, square_cells

_QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50")
_BATCH_MS = 20


@dataclass(frozen=True)
class Load:
    """A contender under steady load: `cycles` of an SM for a million of its operations, `joules` for 10^12 of all."""

    tflops: float
    mhz: float
    watts: float
    cycles: float
    joules: float


def mean(loads: Sequence[Load]) -> Load:
    return Load(*map(statistics.mean, zip(*map(astuple, loads), strict=True)))


def require_readings() -> None:
    """Ends the process where there is no nvidia-smi."""
    if which(_QUERY[0]) is None:
        typer.echo("there is no nvidia-smi, which reads clock and power", err=True)
        raise typer.Exit(2)


def readings(lines: Sequence[str]) -> list[tuple[float, float]]:
    """(MHz, watts) of nvidia-smi's lines, without those that are no numbers: the last may have been cut off."""
    found = []
    for line in lines:
        try:
            mhz, watts = (float(word) for word in line.split(","))
        except ValueError:
            continue
        found.append((mhz, watts))
    return found


@contextmanager
def watched(into: IO[str]) -> Iterator[None]:
    """nvidia-smi writes meanwhile."""
    with subprocess.Popen(_QUERY, stdout=into, text=True) as reader:
        try:
            yield
        finally:
            reader.terminate()


def measure(call: Callable[[], object], flops: float, seconds: float, num_sms: int) -> Load:
    """Raises RuntimeError where nvidia-smi reads nothing."""
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    count = 1
    with TemporaryFile("w+") as text:
        with watched(text):
            end = monotonic() + seconds
            while monotonic() < end:
                begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                for _ in range(count):
                    call()
                done.record()
                done.synchronize()
                times.append(begun.elapsed_time(done) / count)
                count = max(1, int(_BATCH_MS / times[-1]))
        text.seek(0)
        read = readings(text.read().splitlines())
    late = read[len(read) // 2 :]
    if not late:
        raise RuntimeError("nvidia-smi read no clock and no power")
    mhz, watts = (statistics.mean(values) for values in zip(*late, strict=True))
    rate = flops / statistics.median(times[len(times) // 2 :]) / 1e9  # TFLOP/s
    return Load(rate, mhz, watts, mhz * num_sms / rate, watts / rate)


def steadily(
    calls: Mapping[str, Callable[[], object]], flops: float, seconds: float, device: torch.device
) -> dict[str, Load]:
    """Each call's mean of two turns, the second in the opposite order, as who comes behind whom matters."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, list[Load]] = {name: [] for name in calls}
    for name in (*calls, *reversed(list(calls))):
        found[name].append(measure(calls[name], flops, seconds, num_sms))
    return {name: mean(loads) for name, loads in found.items()}


def contenders(section: Section, head_dim: int, only: Sequence[str] | None) -> list[Contender]:
    """Ours, of the backward all tiles, and peers that can be imported; or those that are named."""
    ours = backward_tiles.contenders_of(head_dim, None) if section is Section.BACKWARD else [REGISTRY[OURS]]
    there = [*ours, *peers(PEERS[section])]
    if only and (unknown := set(only) - {each.name for each in there}):
        raise typer.BadParameter(f"no contender named {sorted(unknown)}; there are {[each.name for each in there]}")
    return [each for each in there if not only or each.name in only]


def main(
    section: Annotated[Section, typer.Argument(help="what runs")],
    head_dims: Annotated[str, typer.Option(help="such as 64,128")] = "128",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = "2048,16384",
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    only: Annotated[str | None, typer.Option(help="only these contenders, by their names")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="how long each runs")] = 1.5,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Reads clock and power while kernels run."""
    device = require_gpu()
    require_readings()
    cells = square_cells(CELLS[section](numbers(head_dims), numbers(seqlens)), causal)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    header, rows, table = ["d", "mask", "q=keys", "contender", *Load.__annotations__], [], []
    for cell in cells:
        t = Tensors.random(cell, device)
        for contender in contenders(section, cell.head_dim, only.split(",") if only else None):
            load = measure(contender.makes[section](cell, t), cell.flops, seconds, num_sms)
            rows.append({"section": section, "cell": asdict(cell), "contender": contender.name, **asdict(load)})
            figures = [
                f"{value:.{digits}f}" for value, digits in zip(asdict(load).values(), (0, 0, 0, 1, 3), strict=True)
            ]
            table.append([str(cell.head_dim), cell.mask, f"{cell.batch}x{cell.seqlen_k}", contender.name, *figures])
            typer.echo(plain_table(header, table[-1:]).splitlines()[-1])
    typer.echo("\n" + plain_table(header, table))
    if out:
        write_out(
            out, json.dumps({"machine": machine.facts(commit), "seconds": seconds, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
