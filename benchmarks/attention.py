"""Attention speed: our kernels beside torch's SDPA (cuDNN, FlashAttention-2, memory-efficient) and FlexAttention.

    python benchmarks/attention.py [forward|decode|paged|all] [--quick] [--head-dims 64,128] [--seqlens 2048,8192]
                                   [--flex] [--out results.json]

Every contender of a cell is checked against torch SDPA before it is timed. Contenders take turns on the same random
inputs in the same run; a time is the median of CUDA-event timings with the L2 flushed before each call. Decode is
replayed from CUDA graphs, as engines run it: otherwise the host's time to launch is what is measured. TFLOP/s count
4 * batch * heads * rows * keys * head_dim, halved under a causal mask; decode counts bytes of keys and values read.

Expected times on an H200, kernels cold: forward 3 minutes (one head dim: 1), decode 1.5, paged 1, `all --quick` 1;
`--flex` adds about 3. Parts that fit a time limit are chosen by section, --head-dims and --seqlens.

Exit code 0: timed (goals may be missed). 1: a result of ours was wrong or missing. 2: no NVIDIA GPU.
"""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import machine
from benchmarks.attention_cells import SECTIONS, Cell, quick, select
from benchmarks.attention_contenders import FA2, OURS, OURS_GENERIC, REGISTRY, Call, Contender, Tensors, relative_error
from benchmarks.attention_report import Record, Report, Result
from benchmarks.stopwatch import Stopwatch, alternate, copy_bandwidth

TOLERANCE = 1e-2  # relative; two bf16 implementations differ by about 3e-3
_ROTATED_BYTES = 256 * 1024 * 1024
_MAX_SETS = 8


class Section(StrEnum):
    """What to time; the names of SECTIONS and all of them."""

    forward = "forward"
    decode = "decode"
    paged = "paged"
    all = "all"


def input_sets(cell: Cell) -> int:
    """How many input sets together are larger than any L2."""
    return max(1, min(_MAX_SETS, -(-_ROTATED_BYTES // cell.input_bytes)))


def reason_of(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"


def prepare(cell: Cell, sets: Sequence[Tensors], contender: Contender) -> tuple[list[Call], Result]:
    """The calls of a contender over all input sets, checked on the first; no calls when it cannot run or is wrong."""
    try:
        calls = [contender.make(cell, tensors) for tensors in sets]
        error = relative_error(cell, sets[0], calls[0]())
    except Exception as failure:  # whatever stops a peer is its reason in the record
        return [], Result(None, reason_of(failure))
    if not error <= TOLERANCE:  # NaN is wrong too
        return [], Result(None, f"wrong result: relative error {error:.2e}", None)
    if cell.section == Section.decode and sets[0].q.is_cuda:
        try:
            calls = [captured(call) for call in calls]
        except Exception as failure:  # as above
            return [], Result(None, f"not captured in a CUDA graph: {reason_of(failure)}", error)
    return calls, Result(None, None, error)


def captured(call: Call) -> Call:
    """The call as the replay of a CUDA graph."""
    call()  # so that nothing is compiled or loaded in the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def time_cell(cell: Cell, contenders: Sequence[Contender], watch: Stopwatch, rounds: int) -> Record:
    sets = [Tensors.random(cell, watch.device) for _ in range(input_sets(cell))]
    prepared = {c.name: prepare(cell, sets, c) for c in contenders if cell.section in c.sections}
    medians = alternate({name: calls for name, (calls, _) in prepared.items() if calls}, watch.times, rounds)
    results = {}
    for name, (_, checked) in prepared.items():
        median = medians.get(name)
        if median is None:
            results[name] = checked
        elif isinstance(median, Exception):
            results[name] = Result(None, reason_of(median), checked.error)
        else:
            results[name] = Result(median, None, checked.error)
    return Record(cell, results)


def progress(record: Record) -> str:
    cell = record.cell
    shape = f"{cell.section} d={cell.head_dim} {cell.mask} {cell.batch}x{cell.seqlen_q}x{cell.seqlen_k}"
    return shape + "".join(f"  {name} {r.ms:.4f} ms" if r.ms else f"  {name} -" for name, r in record.results.items())


def numbers(text: str | None) -> list[int] | None:
    try:
        return [int(x) for x in text.split(",")] if text else None
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 64,128") from error


def main(
    section: Annotated[Section, typer.Argument(help="what to time")] = Section.all,
    quick_: Annotated[bool, typer.Option("--quick", help="a few cells of each section")] = False,
    head_dims: Annotated[str | None, typer.Option(help="only these, such as 64,128")] = None,
    seqlens: Annotated[str | None, typer.Option(help="only these lengths (of keys)")] = None,
    only: Annotated[str | None, typer.Option(help="only these contenders, such as longwave,fa2")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="time FlexAttention too (compiles)")] = False,
    flush: Annotated[bool, typer.Option(help="flush the L2 before every call")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 2,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times our attention kernels beside their peers."""
    dims, lengths = numbers(head_dims), numbers(seqlens)
    if not torch.cuda.is_available():
        typer.echo("This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.", err=True)
        raise typer.Exit(2)
    sections = SECTIONS if section is Section.all else (section.value,)
    cells = select(sections, dims, lengths)
    cells = quick(cells) if quick_ else cells
    wanted = only.split(",") if only else [name for name, c in REGISTRY.items() if flex or not c.optional]
    unknown = set(wanted) - set(REGISTRY)
    if unknown or not cells:
        raise typer.BadParameter(f"no contender named {sorted(unknown)}" if unknown else "no cell has these dimensions")
    watch = Stopwatch(torch.device("cuda", torch.cuda.current_device()), flush=flush)
    options = {"flush": flush, "rounds": rounds, "warm_up_ms": watch.warm_up_ms, "repeat_ms": watch.repeat_ms}
    report = Report(machine.facts(commit), options, OURS, OURS_GENERIC, FA2, copy_bandwidth(watch))
    facts = {name: report.machine[name] for name in ("gpu", "driver", "torch", "cuda", "cudnn", "commit")}
    typer.echo(f"{facts}\ndevice copy {report.copy_tb_per_s:.2f} TB/s (read + write)")
    for cell in cells:
        report.records.append(time_cell(cell, [REGISTRY[name] for name in wanted], watch, rounds))
        torch.cuda.empty_cache()
        typer.echo(progress(report.records[-1]))
        if out:
            report.write(out)
    summarise(report, sections)
    ours = [r.results[name] for r in report.records for name in (OURS, OURS_GENERIC) if name in r.results]
    if any(result.ms is None for result in ours):
        raise typer.Exit(1)


def summarise(report: Report, sections: Sequence[str]) -> None:
    for section in sections:
        typer.echo("\n" + report.table(section))
    typer.echo("\n" + "\n".join([*report.missing(), *map(str, report.goals())]))


if __name__ == "__main__":
    typer.run(main)
