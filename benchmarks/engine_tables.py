"""The measured tables of whole models on a GPU: served, trained. Every function takes the folder of results."""

from collections import Counter
from pathlib import Path

from benchmarks.markdown import load, origin, short, table
from benchmarks.serving_goals import GOALS, OFFLINE, OURS, Goal, Run
from benchmarks.serving_peers import VLLM

SERVING_ROWS = (  # case, figure, what a reader calls it, digits
    ("ttft_32k", "ms", "time to first token of 32,768 tokens, ms", 0),
    ("ttft_131k", "ms", "time to first token of 131,072 tokens, ms", 0),
    ("tpot_b1_1024", "p50", "median gap between tokens after 1,024 tokens, ms", 2),
    ("tpot_b1_131072", "p50", "median gap between tokens after 131,072 tokens, ms", 2),
    ("32x32k_128", "total_tok_s", "32 prompts of 32,768 at once: tokens/s, prompts included", 0),
    ("32x32k_128", "itl_p50_tail", "the same: median gap before the last 64 tokens of each, ms", 1),
    ("shared_100k_x64", "out_tok_s", "64 questions on one 100,000-token document: tokens/s", 0),
    ("shared_100k_x64", "itl_p50", "the same: median gap, ms", 1),
    ("nested_prefixes", "out_tok_s", "64 questions on 16 documents of 8,192 behind 4,096 common tokens: tokens/s", 0),
    ("nested_prefixes", "itl_p50", "the same: median gap, ms", 1),
    ("64x8k_256", "out_tok_s", "64 prompts of 8,192 at once: tokens/s", 0),
    ("64x8k_256", "itl_p50_tail", "the same: median gap before the last 64 tokens of each, ms", 1),
    ("256x1k_128", "out_tok_s", "256 prompts of 1,024 at once: tokens/s", 0),
    ("256x1k_128", "itl_p50_tail", "the same: median gap before the last 64 tokens of each, ms", 1),
    ("chats_alone", "ttft_p99", "chats alone: p99 time to first token, ms", 0),
    ("chats_alone", "itl_p50", "the same: median gap, ms", 1),
    ("chats_alone", "itl_p99", "the same: p99 gap, ms", 1),
    ("chats_alone", "tpot_p99", "the same: p99 time per token, ms", 1),
    ("chats_under_131k_prefill", "ttft_p99", "chats beside a 131,072-token prompt: p99 time to first token, ms", 0),
    ("chats_under_131k_prefill", "itl_p50", "the same: median gap, ms", 1),
    ("chats_under_131k_prefill", "itl_p99", "the same: p99 gap, ms", 1),
    ("chats_under_131k_prefill", "tpot_p99", "the same: p99 time per token, ms", 1),
    ("chats_under_131k_prefill", "long_ttft_ms", "the same: the long prompt's first token, ms", 0),
    ("start", "s", "process started to its first token, s", 0),
    ("start_cold", "s", "process started to its first token, weights drawn, no kernels cached, s", 0),
    ("start_warm", "s", "the same again, s", 0),
)


SIGNS = {"<=": "≤", ">=": "≥"}
_PAGES = "--kv-cache-dtype"
MARKS = ("*", "†", "‡", "§", "¶", "#", "**", "††", "‡‡", "§§")  # of rows from other commits than most


def serving(results: Path) -> str:
    """The engine beside vLLM, both in process, without HTTP, one after the other on one card. A row that neither has is
    left out. Raises ValueError when the file has not exactly one such run of each."""
    facts = load(results / "serving_h200.json")
    runs = [Run(**run) for run in facts["runs"] if run["driver"] == OFFLINE]
    (ours,), (peer,) = ([run for run in runs if run.engine == engine] for engine in (OURS, VLLM))
    judged = ("peer", "absolute", "case")
    asked = {(goal.case, goal.figure): goal for goal in GOALS if goal.of in judged and goal.factor}
    most = _commit_of_most(ours)
    others: dict[str, str] = {}  # commit -> its mark
    rows = []
    for case, figure, name, digits in SERVING_ROWS:
        mine, theirs = (run.figure(case, figure) for run in (ours, peer))
        if (mine is None and theirs is None) or (case == "start" and "start_cold" in ours.rows):
            continue
        numbers = ["-" if value is None else f"{value:,.{digits}f}" for value in (mine, theirs)]
        ratio = "-" if mine is None or theirs is None else _ratio(mine, theirs, asked.get((case, figure)))
        at = _commits(ours, peer, case)
        title = name
        if at != most:
            if at not in others:
                others[at] = MARKS[len(others)]
            title = f"{name} {others[at]}"
        rows.append([title, *numbers, ratio, *judgement(asked.get((case, figure)), ours, mine, theirs)])
    version = next(row["version"] for row in peer.rows.values() if "version" in row)
    starred = "".join(f"; {mark} {commit}" for commit, mark in others.items())
    text = (
        f"The engine beside vLLM {version} ({peer.variant}), both in process, one after the other on one card,\n"
        f"the shape of Llama-3.1-8B with random bf16 weights\n({origin(facts, most)}{starred}).\n"
        "A gap is the time before one token, of all answers; time per token is an answer's mean gap. Of 24"
        " chats alone and 36\nbeside the prompt a p99 of answers is the largest:\n\n"
    )
    return text + table(["case", "ours", "vLLM", "ours / vLLM", "goal", "met"], rows)


def _ratio(mine: float, theirs: float, goal: Goal | None) -> str:
    """Rounded, but never to the other side of a goal that is one of ratios."""
    digits = 2
    if goal is not None and goal.of == "peer":
        while goal.is_met(round(mine / theirs, digits), 1.0) != goal.is_met(mine, theirs):
            digits += 1
    return f"{mine / theirs:.{digits}f}"


def _commits(ours: Run, peer: Run, case: str) -> str:
    """Of a row: of both engines, where they ran it at different ones."""
    both = {name: _commit(run, case) for name, run in (("ours", ours), ("vLLM", peer)) if case in run.rows}
    if len(set(both.values())) == 1:
        return next(iter(both.values()))
    return "in two runs: " + ", ".join(f"{name} {commit}" for name, commit in both.items())


def _commit(run: Run, case: str) -> str:
    """As `origin` says it: commit and day."""
    row = run.rows[case]
    return f"commit {short(row['commit'])}, {row['date'][:10]}"


def _commit_of_most(run: Run) -> str:
    return Counter(_commit(run, case) for case in run.rows).most_common(1)[0][0]


def judgement(goal: Goal | None, ours: Run, mine: float | None, theirs: float | None) -> tuple[str, str]:
    """What was asked for, and whether it is so."""
    if goal is None or goal.factor is None:
        return "-", ""
    alone = ours.figure(*goal.other) if goal.of == "case" else None
    against, unit = {"peer": (theirs, " x"), "absolute": (1.0, ""), "case": (alone, " x alone")}[goal.of]
    met = "" if mine is None or against is None else ("no", "yes")[bool(goal.is_met(mine, against))]
    return f"{SIGNS[goal.sense]} {goal.factor:g}{unit}", met


def longcontext(results: Path) -> str:
    """One prompt through the HTTP server, over pages of the model's dtype, and longer ones over float8 pages."""
    parts, rows = [], []
    for name in ("longcontext", "longcontext_1m"):
        facts = load(results / f"{name}_h200.json")
        flags = facts["server_flags"]
        pages = flags[flags.index(_PAGES) + 1] if _PAGES in flags else "bf16"
        rows += [
            [f"{case['prompt_tokens']:,}", pages, f"{case['ttft_ms'] / 1e3:,.2f} s", f"{case['tpot_ms']:.1f} ms"]
            for case in facts["cases"]
        ]
        memory = facts["gpu_memory_peak_mib"] / 1024
        parts.append(f"{pages}: {origin(facts)}; ready after {facts['ready_s']:.0f} s, {memory:.0f} GiB of GPU memory")
    text = (
        "One prompt of random tokens through the HTTP server, the shape of Llama-3.1-8B with random bf16 weights\n"
        f"({parts[0]};\n{parts[1]}, KV pool included):\n\n"
    )
    return text + table(["prompt", "KV cache", "time to first token", "time per output token"], rows)


def training(results: Path) -> str:
    """A step of LoRA training, whose contenders differ in attention and loss alone."""
    facts = load(results / "training_h200.json")
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
