"""Times one cell of the attention benchmark: inputs, contenders in turn, each checked before and after."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import Call, Contender, Output
from benchmarks.attention_report import MEASURED, Record, Result
from benchmarks.attention_truth import Truth, acceptable
from benchmarks.stopwatch import Stopwatch, alternate

#: Sections that are replayed from CUDA graphs, as engines run them.
GRAPHED = ("decode", "latency", "shared_prefix", "fp8_kv")
_ROTATED_BYTES = 256 * 1024 * 1024
_MAX_SETS = 8
_AHEAD_BYTES = 1 << 30  # cells with larger inputs compile when they are timed


def input_sets(cell: Cell, flush: bool) -> int:
    """How many input sets are timed in turn: one where the L2 is flushed, else as many as are larger than any L2; of
    calls that follow each other in a graph, one each."""
    if cell.calls > 1:
        return cell.calls
    return 1 if flush else max(1, min(_MAX_SETS, -(-_ROTATED_BYTES // cell.input_bytes)))


def reason_of(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"


def prepare(
    cell: Cell, sets: Sequence[Tensors], truth: Truth, contender: Contender, section: str
) -> tuple[list[Call], Result]:
    """The calls of a contender over all input sets, checked on the first; no calls when it cannot run or is wrong."""
    try:
        calls = [contender.makes[section](cell, tensors) for tensors in sets]
        error = truth.error(on_nan(calls[0]))
    except Exception as failure:  # whatever stops a peer is its reason in the record
        return [], Result(None, reason_of(failure))
    if not acceptable(cell, error):  # NaN is wrong too
        return [], Result(None, f"wrong result: relative error {error:.2e}", None)
    extra = extra_bytes(calls[0]) if section in MEASURED and sets[0].q.is_cuda else None
    if section in GRAPHED and sets[0].q.is_cuda:
        try:
            calls = [captured(calls)] if cell.calls > 1 else [captured([call]) for call in calls]
        except Exception as failure:  # as above
            return [], Result(None, f"not captured in a CUDA graph: {reason_of(failure)}", error)
    return calls, Result(None, None, error, extra_bytes=extra)


def on_nan(call: Call) -> Output:
    """What the call returns where its last result was, which is NaN by then: torch's allocator gives the same memory
    again. So what a call leaves unwritten is not what another one had written there."""
    _spoil(call())
    return call()


def _spoil(out: Output) -> None:
    for x in out if isinstance(out, tuple) else (out,):
        x.fill_(math.nan)


def extra_bytes(call: Call) -> int:
    """What a call allocates at its peak beyond what there was, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Replay:
    """A captured graph as a call. What it reads (tables, scales, plans, workspaces) may be held by its calls alone."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]
    outs: Sequence[Output]

    def __call__(self) -> Output:
        self.graph.replay()
        return self.outs[0]


def captured(calls: Sequence[Call]) -> Replay:
    """The calls, one after the other, as the replay of a CUDA graph; returns what the first one returned."""
    for call in calls:
        call()  # so that nothing is compiled or loaded in the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for call in calls]
    return Replay(graph, calls, outs)


def time_cell(cell: Cell, contenders: Sequence[Contender], watch: Stopwatch, rounds: int) -> Record:
    """Every contender of the cell's section; those that run its dense twin have inputs of the twin."""
    racing = [c for c in contenders if cell.section in c.makes]
    problems: dict[Cell, tuple[list[Tensors], Truth]] = {}
    prepared: dict[str, tuple[list[Call], Result]] = {}
    for contender in racing:
        problem = contender.cell(cell)
        if problem not in problems:
            sets = [Tensors.random(problem, watch.device) for _ in range(input_sets(problem, watch.flush))]
            problems[problem] = sets, Truth.of(problem, sets[0])
        prepared[contender.name] = prepare(problem, *problems[problem], contender, cell.section)
    medians = alternate({name: calls for name, (calls, _) in prepared.items() if calls}, watch.times, rounds)
    results = {}
    for contender in racing:
        calls, checked = prepared[contender.name]
        problem = contender.cell(cell)
        twin = problem if problem != cell else None
        median = medians.get(contender.name)
        if median is None:
            results[contender.name] = replace(checked, twin=twin)
            continue
        reason = reason_of(median) if isinstance(median, Exception) else still_right(problems[problem][1], calls[0])
        ms = None if reason or isinstance(median, Exception) else median / cell.calls
        results[contender.name] = replace(checked, ms=ms, reason=reason, twin=twin)
    return Record(cell, results)


def still_right(truth: Truth, call: Call) -> str | None:
    """Why the call's result is not right any more, after it was repeated so often."""
    try:
        error = truth.error(on_nan(call))
    except Exception as failure:
        return reason_of(failure)
    return None if acceptable(truth.cell, error) else f"wrong after repeats: relative error {error:.2e}"


def first_calls(cells: Sequence[Cell], contenders: Sequence[Contender]) -> list[tuple[str, Cell, Contender]]:
    """Section, problem and contender of every different call of ours, those of different kernels first: calls of the
    same kernel wait for one compilation."""
    seen: set[tuple[str, str, Cell]] = set()
    alike: Counter[tuple[object, ...]] = Counter()
    ranked = []
    for cell in cells:
        for contender in contenders:
            problem, section = contender.cell(cell), cell.section
            key = (contender.name, section, problem)
            if not contender.ours or section not in contender.makes or key in seen:
                continue
            seen.add(key)
            if problem.input_bytes <= _AHEAD_BYTES:
                shape = (problem.head_dim, problem.causal, problem.page)
                kernel = (contender.name, section, *shape, problem.dtype, problem.option)
                ranked.append((alike[kernel], (section, problem, contender)))
                alike[kernel] += 1
    return [call for _, call in sorted(ranked, key=lambda x: x[0])]


def compile_ahead(cells: Sequence[Cell], contenders: Sequence[Contender], device: torch.device) -> int:
    """Makes the first call of our contenders in every cell on all cores, as compiling does not hold the interpreter.

    Returns how many calls it made. What fails here fails again in its cell, and is recorded there.
    """

    def call_once(section: str, problem: Cell, contender: Contender) -> None:
        try:
            contender.makes[section](problem, Tensors.random(problem, device))()
        except Exception:  # recorded when the cell is timed
            return

    calls = first_calls(cells, contenders)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for call in calls:
            pool.submit(call_once, *call)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return len(calls)
