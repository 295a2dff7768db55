"""Attention speed: our kernels beside torch's SDPA (cuDNN, FlashAttention-2, memory-efficient), FlashAttention-3 and 4,
FlashInfer and FlexAttention, and our goals, computed from what was timed.

    python benchmarks/attention.py [SECTION ...] [--quick] [--head-dims 64,128] [--seqlens 2048,8192]
                                   [--only longwave,cudnn] [--flex] [--slow] [--out results.json]
    python benchmarks/attention.py --peers       which peers can be imported here

Sections: forward, backward, decode, latency, paged, chunk, varlen, padding, shared_prefix, fp8_kv, fp8_forward,
fp8_error, block_sparse, dropout, shapes, features, patterns; all of them by default. Peers that are packages of their
own (flash_attn_interface, flash_attn.cute, flashinfer) are timed when they can be imported; they cannot all be in one
process, so a run times those of its PYTHONPATH, and ratios are within a run.

Contenders take turns on the same random inputs in the same run; a time is the median of CUDA-event timings with the L2
flushed before each call. Calls are queued while the GPU waits, so the host's time to launch is in no time. Each
contender's result is compared with a float32 truth before and after it is timed, on up to 64 rows of up to 4 sequences.
Decode is replayed from CUDA graphs, as engines run it. TFLOP/s count 4 * heads * head_dim for every visible pair of a
row and a key (a causal square as its half); decode counts bytes of keys and values read.

Exit code 0: timed (goals may be missed). 1: a result of ours was wrong or missing. 2: no NVIDIA GPU, or an argument
that names nothing.
"""

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_contenders import REGISTRY, Contender, chosen, peer_versions, peers_found
from benchmarks.attention_goals import goals
from benchmarks.attention_grid import SECTIONS, quick, select
from benchmarks.attention_report import Record, Report
from benchmarks.attention_timing import compile_ahead, time_cell
from benchmarks.stopwatch import FLUSHED_BY, ORDERED_BY, Stopwatch, copy_bandwidth

Section = StrEnum("Section", {name: name for name in (*SECTIONS, "all")})  # type: ignore[misc]


def progress(record: Record) -> str:
    times = (f"  {name} {r.ms:.4f} ms" if r.ms else f"  {name} -" for name, r in record.results.items())
    return str(record.cell) + "".join(times)


def peers_line() -> str:
    found = peers_found()
    here = [f"{name} ({version})" for name, version in peer_versions().items()]
    absent = [name for name, yes in found.items() if not yes]
    return f"peers found: {', '.join(here) or 'none'}; not importable, so not timed: {', '.join(absent) or 'none'}"


def named(only: str | None) -> list[str] | None:
    if only is None:
        return None
    names = only.split(",")
    if unknown := set(names) - set(REGISTRY):
        raise typer.BadParameter(f"no contender named {sorted(unknown)}; there are {', '.join(REGISTRY)}")
    return names


def main(
    section: Annotated[list[Section] | None, typer.Argument(help="what to time; all by default")] = None,
    quick_: Annotated[bool, typer.Option("--quick", help="a few cells of each section")] = False,
    head_dims: Annotated[str | None, typer.Option(help="only these, such as 64,128")] = None,
    seqlens: Annotated[str | None, typer.Option(help="only these lengths (of keys)")] = None,
    only: Annotated[str | None, typer.Option(help="only these contenders, such as longwave,fa2")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="time FlexAttention too (compiles)")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="time our generic kernel and memory-efficient too")] = False,
    flush: Annotated[bool, typer.Option(help="flush the L2 before every call")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 10,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 15.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    ahead: Annotated[bool, typer.Option(help="compile our kernels on all cores first")] = True,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="say which peers can be imported, and end")] = False,
) -> None:
    """Times our attention kernels beside their peers."""
    if peers:
        typer.echo(peers_line())
        return
    dims, lengths = (numbers(text) if text else None for text in (head_dims, seqlens))
    names = named(only)
    device = require_gpu()
    asked = {str(s) for s in section or [Section("all")]}
    sections = [s for s in SECTIONS if s in asked or "all" in asked]
    cells = select(sections, dims, lengths)
    cells = quick(cells) if quick_ else cells
    racing = {s: chosen(s, names, slow, flex) for s in sections}
    cells = [cell for cell in cells if racing[cell.section]]
    if not cells:
        raise typer.BadParameter("no cell has these dimensions and contenders")
    watch = Stopwatch(device, flush, warm_up_ms, repeat_ms)
    options = {"flush": flush and FLUSHED_BY, "rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms}
    options["order"] = ORDERED_BY
    report = Report(machine.facts(commit), options | {"peers": peer_versions()}, copy_bandwidth(watch))
    facts = {name: report.machine[name] for name in ("gpu", "driver", "torch", "cuda", "cudnn", "commit")}
    typer.echo(f"{facts}\n{peers_line()}\ndevice copy {report.copy_tb_per_s:.2f} TB/s (read + write)")
    if ahead:
        begin = time.monotonic()
        everyone: list[Contender] = list({c.name: c for cs in racing.values() for c in cs}.values())
        calls = compile_ahead(cells, everyone, watch.device)
        typer.echo(f"{calls} first calls of ours, compiled ahead: {time.monotonic() - begin:.1f} s")
    for cell in cells:
        begin = time.monotonic()
        report.records.append(time_cell(cell, racing[cell.section], watch, rounds))
        torch.cuda.empty_cache()
        typer.echo(f"{progress(report.records[-1])}  ({time.monotonic() - begin:.1f} s)")
        if out:
            report.write(out, [goal.facts() for goal in goals(report.records, report.copy_tb_per_s)])
    summarise(report, sections)
    ours = [r for record in report.records for name, r in record.results.items() if REGISTRY[name].ours]
    if any(result.ms is None for result in ours):
        raise typer.Exit(1)


def summarise(report: Report, sections: Sequence[str]) -> None:
    for section in sections:
        typer.echo("\n" + report.table(section))
    timed = [goal for goal in goals(report.records, report.copy_tb_per_s) if goal.values or goal.failed]
    typer.echo("\n" + "\n".join([*report.missing(), *map(str, timed)]))


if __name__ == "__main__":
    typer.run(main)
