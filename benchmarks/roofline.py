"""FLOPs, HBM bytes, time and memory of attention as it was and as it is, over the length: the seeds' claims, measured.

    python benchmarks/roofline.py [--seqlens 1024,4096] [--out results.json] [--plot plot.png] [--no-counters]

Standard attention (scores as a tensor), Rabe & Staats' algorithm in torch, and every attention kernel of ours: batch 1,
16 heads, head_dim 128, bfloat16, full and causal. Rabe & Staats' algorithm as written has no mask; decodes are one row,
requests on shared keys 64 rows, which see every key. Every result is checked: against torch SDPA and its gradients,
linear attention against its formula.
Times are medians of CUDA events with the L2 flushed before each call. FLOPs are counted; TFLOP/s count what the
method's formula needs: for softmax attention 4 * heads * rows * keys * head_dim, halved under a causal mask. HBM bytes
are read from the hardware counters at some lengths (ncu, in processes of its own), else counted on paper: the row says
which. Extra memory is torch's peak beyond inputs and outputs; workspaces that a process keeps between calls are not in
it.

Some minutes on an H200, half of them under ncu.

Exit code 0: measured (the goal may be missed). 1: a result of ours was wrong or missing. 2: no NVIDIA GPU.
"""

import importlib.util
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.hbm_counters import CountersUnavailableError, HbmBytes, measure
from benchmarks.roofline_counts import Shape
from benchmarks.roofline_methods import (
    HOPPER,
    METHODS,
    OURS,
    RABE_STAATS,
    STANDARD,
    Method,
    random_tensors,
)
from benchmarks.roofline_ours import Call, NotServedError, Outputs
from benchmarks.roofline_report import Report, Row
from benchmarks.stopwatch import Stopwatch, copy_bandwidth

SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
COUNTED_AT = (4096, 16384)  # lengths whose bytes the counters say, full attention
#: One ncu each, so that the many small kernels of one cannot cost the others their numbers.
PROBED = ((STANDARD, HOPPER), (RABE_STAATS,), tuple(method.name for method in OURS if method.name != HOPPER))
_MATMUL = 8192
_SPARE = 2**30  # bytes of the device's memory that a method may not plan with


def relative_error(outputs: Outputs, truth: Outputs) -> float:
    """|out - truth| / |truth| (Frobenius), the largest of several; infinite when one has a NaN."""
    errors = [
        float((out.float() - true.float()).norm() / true.float().norm())
        for out, true in zip(outputs, truth, strict=True)
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def extra_memory(call: Call, device: torch.device) -> int:
    """Bytes that torch allocated at the peak of a call, beyond what was there before and the outputs."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = call()
    torch.cuda.synchronize(device)
    returned = sum(out.numel() * out.element_size() for out in outputs)
    return max(0, torch.cuda.max_memory_allocated(device) - before - returned)


def row_of(method: Method, shape: Shape, watch: Stopwatch) -> Row:
    """The method at a shape, measured; or the row with the reason why it could not be."""
    row = Row(method.name, method.title, shape, method.work(shape))
    torch.cuda.empty_cache()
    needed, free = method.memory(shape), torch.cuda.mem_get_info(watch.device)[0]
    if needed > free - _SPARE:
        reason = f"does not fit: {needed / 1e9:.0f} GB of scores and weights, {free / 1e9:.0f} GB free"
        return replace(row, reason=reason)
    try:
        tensors = random_tensors(shape, watch.device)
        call = method.make(shape, tensors)
        error = relative_error(call(), method.truth(shape, tensors))
        if error > method.tolerance:
            return replace(row, reason=f"wrong result: relative error {error:.2e}", wrong=True)
        extra = extra_memory(call, watch.device)
        ms = statistics.median(watch.times([call]))
    except NotServedError as reason:
        return replace(row, reason=str(reason))
    except Exception as failure:  # its reason stands in the row
        text = str(failure).strip().splitlines()
        return replace(row, reason=f"{type(failure).__name__}: {text[0][:160] if text else 'no message'}", wrong=True)
    return replace(row, ms=ms, extra_bytes=extra, error=error)


def matmul_tflops(watch: Stopwatch) -> float:
    a, b = (torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=watch.device) for _ in range(2))
    return 2 * _MATMUL**3 / statistics.median(watch.times([lambda: a @ b])) / 1e9


def probes_of(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The rows of these methods whose bytes are to be counted, as hbm_probe.py takes them."""
    chosen = [r for r in rows if r.method in names and r.ms and not r.shape.causal and r.shape.keys in COUNTED_AT]
    return [probe_of(row) for row in chosen]


def probe_of(row: Row) -> str:
    return f"{row.method}:{row.shape.keys}:{row.shape.mask}"


def read_counters(report: Report, ncu: str) -> None:
    """Puts the counters' bytes in their rows, and says which could not be read."""
    found: dict[str, HbmBytes] = {}
    for names in PROBED:
        probes = probes_of(names, report.rows)
        try:
            found |= measure(probes, ncu) if probes else {}
        except CountersUnavailableError as error:
            report.missing_counters.append(f"{', '.join(probes)}: {error}")
    report.rows = [replace(row, counters=found.get(probe_of(row))) for row in report.rows]


def main(
    seqlens: Annotated[str, typer.Option(help="lengths")] = ",".join(map(str, SEQLENS)),
    counters: Annotated[bool, typer.Option(help="read HBM bytes from the hardware counters")] = True,
    ncu: Annotated[str, typer.Option(help="Nsight Compute's command line")] = "ncu",
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw a PNG (needs matplotlib)")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Measures attention methods over the length: FLOPs, HBM bytes, time, memory."""
    lengths = numbers(seqlens)
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib; draw later with roofline_plot.py from the file of --out")
    watch = Stopwatch(require_gpu(), warm_up_ms=5, repeat_ms=20)
    report = Report(machine.facts(commit), HOPPER, STANDARD, matmul_tflops(watch), copy_bandwidth(watch))
    typer.echo(f"matrix product {report.matmul_tflops:.0f} TFLOP/s, device copy {report.copy_tb_per_s:.2f} TB/s")
    for method in METHODS.values():
        for shape in method.shapes(lengths):
            report.rows.append(row_of(method, shape, watch))
        typer.echo(f"{method.name} done")
        if out:
            report.write(out)
    torch.cuda.empty_cache()
    if counters:
        read_counters(report, ncu)
    typer.echo("\n".join([report.table(), *report.missing_counters, report.goal_line()]))
    if out:
        report.write(out)
    if plot:
        from benchmarks.roofline_plot import draw

        draw(report.content(), plot)
    if any(row.wrong and METHODS[row.method] in OURS for row in report.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
