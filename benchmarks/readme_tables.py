"""Writes the README's measured tables from the files in benchmarks/results, between their markers.

    python benchmarks/readme_tables.py            rewrites README.md
    python benchmarks/readme_tables.py --check    exit code 1 when README.md says something else

Knows the result files' names and no device.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import attention_results
from benchmarks.attention_goal import Rule, number
from benchmarks.attention_report import Report
from benchmarks.serving_goals import GOALS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"

FORWARD_SEQLENS = (512, 2048, 16384)
DECODE_PEERS = ("flashinfer", "fa3", "fa4", "cudnn", "fa2")
LINEAR_HEAD_DIM, LINEAR_FROM = 128, 8192
TORCH, CONTIGUOUS = ("cudnn", "fa2"), ", contiguous"
GOAL_SIGNS = {Rule.EACH: "≥", Rule.MEAN: "mean ≥", Rule.AT_MOST: "≤"}
Facts = dict[str, Any]


def load(name: str) -> Facts:
    facts: Facts = json.loads((RESULTS / name).read_text())
    return facts


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(facts: Facts) -> str:
    m = facts["machine"]
    return (
        f"{m['gpu']}, driver {m['driver']}, torch {m['torch']}, CuPy {m['cupy']}, "
        f"commit {m['commit'][:10]}, {m['date'][:10]}"
    )


def origins(reports: Sequence[Report]) -> str:
    """Of several runs, each once."""
    return "; ".join(dict.fromkeys(origin({"machine": report.machine}) for report in reports))


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def forward() -> str | None:
    """TFLOP/s of the forward beside the best peer of each cell."""
    return beside_peers("forward", "Forward")


def backward() -> str | None:
    """TFLOP/s of the whole backward beside the best peer of each cell."""
    return beside_peers("backward", "Backward, all its kernels")


def beside_peers(section: str, what: str) -> str | None:
    reports = attention_results.with_section(attention_results.runs(RESULTS), section)
    lines: list[list[str]] = []
    timed: set[str] = set()
    for row in attention_results.rows(reports, section):
        cell, best = row.cell, row.best_peer()
        if cell.seqlen_k not in FORWARD_SEQLENS or cell.heads != cell.kv_heads or best is None:
            continue
        shape = [str(cell.head_dim), cell.mask, str(cell.seqlen_k), f"{cell.batch} x {cell.heads}"]
        peer = f"{attention_results.LABELS.get(best, best)} {row.peer(best):.0f}"
        lines.append([*shape, f"{row.ours:.0f}", peer, f"{row.ratios[best]:.2f}", times(row.ratios.get("cudnn"))])
        timed |= row.ratios.keys()
    if not lines:
        return None
    header = ["head_dim", "mask", "length", "batch x heads", "ours", "best peer", "ours / best", "ours / cuDNN"]
    peers = ", ".join(label for name, label in attention_results.LABELS.items() if name in timed)
    return f"{what}, TFLOP/s; peers timed: {peers} ({origins(reports)}):\n\n" + table(header, lines)


def decode() -> str | None:
    """TB/s of keys and values read by a decode step over shuffled pages of 64 tokens."""
    reports = attention_results.with_section(attention_results.runs(RESULTS), "decode")
    rows = attention_results.rows(reports, "decode")
    if not rows:
        return None
    peers = [name for name in DECODE_PEERS if any(name in row.ratios for row in rows)]
    lines = [
        [
            str(row.cell.batch),
            str(row.cell.seqlen_k),
            f"{row.ours:.2f}",
            f"{100 * row.share_of_copy:.0f} %" if row.share_of_copy else "-",
            *(times(row.ratios.get(name)) for name in peers),
        ]
        for row in rows
    ]
    what = (
        "Decode, one query row, 32 query heads over 8 key heads, head_dim 128, TB/s of keys and values read, from CUDA"
    )
    over = [f"ours / {attention_results.LABELS[name]}" + (CONTIGUOUS if name in TORCH else "") for name in peers]
    header = ["batch", "context", "ours, over pages", "of copy", *over]
    return f"{what}\ngraphs ({origins(reports)}):\n\n" + table(header, lines)


def goals() -> str | None:
    """Every goal of the attention kernels that a run measured."""
    reports = attention_results.runs(RESULTS)
    lines = [
        [
            goal.name,
            f"{GOAL_SIGNS[goal.rule]} {goal.goal:g}",
            number(goal.values[goal.worst]),
            number(goal.mean),
            str(len(goal.values)),
            "yes" if goal.met else "no",
        ]
        for goal in attention_results.all_goals(reports)
    ]
    if not lines:
        return None
    return f"Goals ({origins(reports)}):\n\n" + table(["what", "goal", "worst", "mean", "cells", "met"], lines)


SERVING_ROWS = (  # case, figure, what a reader calls it, digits
    ("ttft_32k", "ms", "time to first token of 32,768 tokens, ms", 0),
    ("ttft_131k", "ms", "time to first token of 131,072 tokens, ms", 0),
    ("tpot_b1_1024", "p50", "time per token after 1,024 tokens, ms", 2),
    ("tpot_b1_131072", "p50", "time per token after 131,072 tokens, ms", 2),
    ("32x32k_128", "total_tok_s", "32 prompts of 32,768 at once: tokens/s, prompts included", 0),
    ("shared_100k_x64", "out_tok_s", "64 questions on one 100,000-token document: tokens/s", 0),
    ("shared_100k_x64", "itl_p50", "the same: time between tokens, ms", 1),
    ("64x8k_256", "out_tok_s", "64 prompts of 8,192 at once: tokens/s", 0),
    ("chats_under_131k_prefill", "ttft_p99", "chats beside a 131,072-token prompt: p99 time to first token, ms", 0),
    ("chats_under_131k_prefill", "tpot_p99", "the same: p99 time per token, ms", 1),
    ("chats_under_131k_prefill", "long_ttft_ms", "the same: the long prompt's first token, ms", 0),
    ("start", "s", "process started to ready, s", 0),
)


SIGNS = {"<=": "≤", ">=": "≥"}


def serving() -> str:
    """The engine beside vLLM, both in process, without HTTP, one after the other on one card."""
    facts = load("serving_h200.json")
    ours, peer = (next(run for run in facts["runs"] if (run["engine"] == "ours") == mine) for mine in (True, False))
    asked = {(goal.case, goal.figure): goal for goal in GOALS if goal.of in ("peer", "absolute") and goal.factor}
    rows = []
    for case, figure, name, digits in SERVING_ROWS:
        mine, theirs = (run["rows"][case][figure] for run in (ours, peer))
        goal = asked.get((case, figure))
        text = "-" if goal is None else f"{SIGNS[goal.sense]} {goal.factor:g}" + (" x" if goal.of == "peer" else "")
        met = "" if goal is None else ("no", "yes")[bool(goal.is_met(mine, theirs if goal.of == "peer" else 1.0))]
        rows.append([name, f"{mine:,.{digits}f}", f"{theirs:,.{digits}f}", f"{mine / theirs:.2f}", text, met])
    version = peer["rows"]["start"]["version"]
    text = (
        f"The engine beside vLLM {version} ({peer['variant']}), both in process, one after the other on one card,\n"
        f"the shape of Llama-3.1-8B with random bf16 weights\n({origin(facts)}):\n\n"
    )
    return text + table(["case", "ours", "vLLM", "ours / vLLM", "goal", "met"], rows)


def longcontext() -> str:
    """One prompt through the HTTP server."""
    facts = load("longcontext_h200.json")
    rows = [
        [f"{case['prompt_tokens']:,}", f"{case['ttft_ms'] / 1e3:.2f} s", f"{case['tpot_ms']:.1f} ms"]
        for case in facts["cases"]
    ]
    memory = facts["gpu_memory_peak_mib"] / 1024
    text = (
        f"One prompt of random tokens through the HTTP server, the shape of Llama-3.1-8B with random bf16 weights\n"
        f"({origin(facts)}; ready after {facts['ready_s']:.0f} s, {memory:.0f} GiB of GPU memory at the peak, KV pool "
        "included):\n\n"
    )
    return text + table(["prompt", "time to first token", "time per output token"], rows)


def training() -> str:
    """A step of LoRA training, whose contenders differ in attention and loss alone."""
    facts = load("training_h200.json")
    found = facts["contenders"]
    ours = found["longwave"]
    rows = [
        [
            name,
            f"{one['tokens_per_s']:,.0f}",
            f"{one['peak_gib']:.1f} GiB",
            f"{ours['tokens_per_s'] / one['tokens_per_s']:.2f}",
        ]
        for name, one in found.items()
    ]
    text = (
        f"LoRA training (rank {facts['lora_rank']}) on {facts['tokens']:,} tokens at once, Llama-3.1-8B's shape,\n"
        'beside the usual peft + transformers loop; "+ chunks": with our loss, whose logits never exist whole\n'
        f"({origin(facts)}):\n\n"
    )
    return text + table(["attention and loss", "tokens/s", "peak memory", "ours is times as fast"], rows)


def linear() -> str:
    """Linear attention's cost over the length; shorter ones are the host's time to launch."""
    facts = load("linear_attention_h200.json")
    rows = []
    for cell in facts["cells"]:
        if cell["head_dim"] == LINEAR_HEAD_DIM and cell["seqlen"] >= LINEAR_FROM:
            softmax, ours = (cell["results"][name]["ms"] for name in ("softmax", "linear"))
            mask = "causal" if cell["causal"] else "full"
            rows.append([mask, f"{cell['seqlen']:,}", f"{softmax:.2f} ms", f"{ours:.2f} ms", f"{softmax / ours:.0f}"])
    what = f"Linear attention beside softmax attention (both ours), 16 heads, head_dim {LINEAR_HEAD_DIM}"
    header = ["mask", "length", "softmax", "linear", "times as fast"]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, rows)


def cpu() -> str:
    """The quick start: the bundled model on two cores, beside transformers' generate."""
    facts = load("quick_start_cpu.json")
    m, speeds = facts["machine"], facts["tokens_per_s"]
    rows = [
        [name, f"{speeds[key]['ours']:.1f}", f"{speeds[key]['transformers']:.1f}"]
        for name, key in (("one", "one_request"), ("eight at once", "8_requests"))
    ]
    alone = speeds["8_requests"]["ours_over_transformers_alone"]
    same = "the same" if facts["same_greedy_tokens"] else "NOT the same"
    text = (
        f"The bundled model on {m['cores']} cores of an {m['cpu']}, float32, tokens per second, beside transformers'\n"
        f"own generate with eager attention, {same} greedy tokens\n"
        f"(torch {m['torch']}, transformers {m['transformers']}, commit {m['commit'][:10]}, {m['date'][:10]};\n"
        f"eight at once give {alone:.1f} times what generate gives one):\n\n"
    )
    return text + table(["requests", "ours", "transformers"], rows)


TABLES: dict[str, Callable[[], str | None]] = {
    "forward": forward,
    "backward": backward,
    "decode": decode,
    "goals": goals,
    "linear": linear,
    "serving": serving,
    "longcontext": longcontext,
    "training": training,
    "cpu": cpu,
}


def rewritten(readme: str) -> str:
    """With every table between its markers; one whose markers are not there, or that has no results, is left out."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if bool(found) != bool(closed):
            raise SystemExit(f"README.md has no whole {begin.strip()} ... {end.strip()}")
        text = make() if found else None
        if text is not None:
            readme = f"{before}{begin}{text}\n{end}{after}"
    return readme


def main() -> None:
    text = README.read_text()
    wanted = rewritten(text)
    if "--check" in sys.argv[1:]:
        sys.exit(int(wanted != text))
    README.write_text(wanted)


if __name__ == "__main__":
    main()
