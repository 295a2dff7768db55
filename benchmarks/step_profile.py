"""Where the time of an engine step goes: kernels of decode steps and prompt chunks, and how long the GPU has nothing.

    python -m benchmarks.step_profile --out benchmarks/results/step_profile_h200.json
    python -m benchmarks.step_profile --decodes 1x1024,64x8192 --chunks 8192@0,8192@24576+32x4096 --top 12

The runner alone (no scheduler, no server), random weights of Llama-3.1-8B's shape; then whole requests through the
engine's loop in this process, which shows what scheduling costs. Steps follow each other as in the engine: one is
launched while the one before runs. "step": wall-clock; "busy": the time in which some kernel ran; "idle": the share of
a step in which none did ("profiled": of the steps that the profiler slows down); "launch": how long this CPU needs to
queue a step on a GPU that has nothing else to do. A chunk may have decodes beside it. Pages hold random numbers, and
the same steps ran for a while before: a GPU that has rested, or multiplies zeros, is faster than one at its power
limit. About a minute on an H200.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine
from benchmarks.arguments import write_out
from benchmarks.engine_steps import BLOCK_SIZE, DECODED, PROFILED, STEPS, Steps, make_runner
from benchmarks.list_link import ListLink
from models import step_shapes
from models.batch import SamplingParams
from models.runner import ModelRunner
from server.engine.config import EngineConfig
from server.engine.core import EngineCore
from server.engine.messages import AddRequest, TokenDelta
from server.engine.runner import LoadedRunner
from server.engine.token_ids import TokenIds
from server.engine.worker import make_scheduler

CHUNKS = "8192@0,8192@24576,256@8192,512@131072+32x4096"
DECODES = 100  # tokens of a request
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace


def through_engine(runner: ModelRunner, prompt_tokens: int, step_tokens: int, max_model_len: int) -> dict[str, float]:
    """Milliseconds of one request alone: to its first token, and then between tokens (median)."""
    config = EngineConfig(
        model="",
        max_num_seqs=64,
        max_num_batched_tokens=step_tokens,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        num_speculative_tokens=0,  # a message is a token
    )
    loaded = LoadedRunner(
        runner=runner, model="", device="cuda", dtype="bfloat16", max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens, vocab_size=128_256, eos_token_ids=(2,), overlaps=True,
    )  # fmt: skip
    link = ListLink()
    core = EngineCore(loaded, make_scheduler(config, loaded), link)
    prompt = torch.randint(10, 100_000, (prompt_tokens,)).tolist()
    sampling = SamplingParams(temperature=1.0, max_tokens=DECODES, ignore_eos=True)
    link.inbox.append(AddRequest("request", TokenIds(prompt), sampling))
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < DECODES:
        core.turn()
        now = time.perf_counter()
        times += [now for message in link.sent if isinstance(message, TokenDelta) and message.token_ids]
        link.sent.clear()
    while core.has_work:
        core.turn()
    gaps = sorted(after - before for before, after in pairwise(times))
    return {"ttft_ms": (times[0] - start) * 1e3, "itl_ms": gaps[len(gaps) // 2] * 1e3}


def measure(work: Steps, steps: int, load_seconds: float) -> dict[str, Any]:
    run = work.run
    run(3, load_seconds)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - start) / steps * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(PROFILED)
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    spans, kernels = [], defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_EVENTS:
            spans.append((event["ts"], event["ts"] + event["dur"]))
            kernels[event["name"]].append(event["dur"])
    if not spans:
        raise SystemExit("the profiler saw no kernels: CUPTI is missing, or another profiler holds the GPU")
    busy, end = 0.0, 0.0
    for first, last in sorted(spans):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    whole = end - min(first for first, _ in spans)
    rows = [{"kernel": n, "calls": len(us) / PROFILED, "us": sum(us) / PROFILED} for n, us in kernels.items()]
    rows.sort(key=lambda row: -row["us"])
    result = {"step_ms": step_ms, "launch_ms": work.launch_ms(), "busy_ms": busy / PROFILED / 1e3}
    idle = {"idle": max(0.0, 1 - result["busy_ms"] / step_ms), "idle_profiled": 1 - busy / whole}
    return result | idle | {"kernels": rows}


def show(name: str, result: dict[str, Any], top: int) -> None:
    figures = (f"{kind} {result[kind + '_ms']:.3f} ms" for kind in ("step", "launch", "busy"))
    typer.echo(f"{name}: {', '.join(figures)}, idle {result['idle']:.1%} (profiled {result['idle_profiled']:.1%})")
    for row in result["kernels"][:top]:
        each = row["us"] / row["calls"]
        typer.echo(f"  {row['us']:10.1f} us  {row['calls']:6.1f} x {each:8.2f}  {row['kernel'][:110]}")


def _pair(cell: str, between: str) -> tuple[int, int]:
    first, second = cell.split(between)
    return int(first), int(second)


def _chunk(cell: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens and context of a chunk, rows and context of the decodes beside it."""
    chunk, _, beside = cell.partition("+")
    return _pair(chunk, "@"), _pair(beside, "x") if beside else (0, 0)


def longest_sequence(
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    chunks: Sequence[tuple[tuple[int, int], tuple[int, int]]],
) -> int:
    """Tokens, of all that is profiled."""
    beside = [work for _, work in chunks if work[0]]
    return max(
        *(length + DECODES for length in prompts),
        *(tokens + context for (tokens, context), _ in chunks),
        *(context + DECODED for _, context in (*decodes, *beside)),
        BLOCK_SIZE,
    )


def most_rows(chunks: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> int:
    """Of a step: so many that all that is profiled runs in the graph that the engine would take for it."""
    most = max((tokens + rows for (tokens, _), (rows, _) in chunks), default=step_shapes.CHUNKS[0])
    return next((rows for rows in step_shapes.CHUNKS if rows >= most), most)


def main(
    decodes: Annotated[str, typer.Option(help="Rows x context of decode steps.")] = "1x1024,1x131072,64x8192",
    prompts: Annotated[str, typer.Option(help="Lengths of prompts that go through the engine.")] = "1024,32768",
    chunks: Annotated[str, typer.Option(help="Tokens@context of chunks, +rows x context of decodes.")] = CHUNKS,
    load: Annotated[float, typer.Option(help="Seconds of such steps before each is measured.")] = 1.5,
    top: Annotated[int, typer.Option(help="Kernels to print.")] = 14,
    out: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded where there is no git.")] = None,
) -> None:
    """Profiles the steps of the engine's runner."""
    wanted_decodes = [_pair(cell, "x") for cell in decodes.split(",") if cell]
    wanted_chunks = [_chunk(cell) for cell in chunks.split(",") if cell]
    wanted_prompts = [int(length) for length in prompts.split(",") if length]
    longest = longest_sequence(wanted_decodes, wanted_prompts, wanted_chunks)
    step_tokens = most_rows(wanted_chunks)
    started = time.perf_counter()
    runner = make_runner(longest, step_tokens)
    typer.echo(f"ready after {time.perf_counter() - started:.1f} s, {runner.num_blocks} blocks")
    results: dict[str, Any] = {}

    def profile_steps(name: str, work: Steps, steps: int) -> None:
        results[name] = measure(work, steps, load)
        work.end()
        show(name, results[name], top)

    for rows, context in wanted_decodes:
        profile_steps(f"decode {rows}x{context}", Steps(runner, (rows, context)), STEPS)
    for chunk, beside in wanted_chunks:
        name = f"chunk {chunk[0]}@{chunk[1]}" + (f" beside {beside[0]}x{beside[1]}" if beside[0] else "")
        profile_steps(name, Steps(runner, beside, chunk), 4 if chunk[0] > 2048 else STEPS)
    for length in wanted_prompts:
        engine = [through_engine(runner, length, step_tokens, longest) for _ in range(3)]
        results[f"engine {length}"] = engine
        typer.echo(f"engine {length}: " + ", ".join(f"{r['ttft_ms']:.1f} ms, then {r['itl_ms']:.3f}" for r in engine))
    if out is not None:
        facts = machine.facts(commit)
        write_out(out, json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
