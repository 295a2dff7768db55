"""The measured tables of attention functions beside their peers. Every function takes the folder of results."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from attention_backend.heuristics.sm90 import ALONE
from benchmarks import attention_results, first_call
from benchmarks.attention_goal import Rule, number
from benchmarks.attention_registry import FA3, OURS, OURS_BF16, OURS_KERNEL
from benchmarks.attention_report import Report
from benchmarks.beside import IN_TURN
from benchmarks.chunks import FORMS
from benchmarks.markdown import load, origin, table

FORWARD_SEQLENS = (512, 2048, 16384)
SUMMARY_PEERS = ("cudnn", "fa2", "fa3", "fa4", "flex", "flashinfer", "flashinfer-cascade")
DECODE_PEERS = ("flashinfer", "fa3", "fa4", "cudnn", "fa2")
LINEAR_HEAD_DIM, LINEAR_FROM = 128, 8192
ROOFLINE_KEYS = 16384  # where the counters were read
TORCH, CONTIGUOUS = ("cudnn", "fa2"), ", contiguous"
SUMMARY = {
    "forward": "forward, head_dim 64, 128 and 256, 512 to 32,768 tokens",
    "padding": "forward, half of the keys padding",
    "backward": "backward, head_dim 64, 128 and 256, 512 to 65,536 tokens",
    "decode": "decode over shuffled pages (cuDNN, FA2: contiguous keys), 1,024 to 131,072 tokens",
    "shared_prefix": "decode, 64 requests that share 100,000 tokens",
}
GOAL_SIGNS = {Rule.EACH: "≥", Rule.MEAN: "mean ≥", Rule.AT_MOST: "≤"}


def origins(runs: Iterable[Report | first_call.Report]) -> str:
    """Where they ran, each place once, with every commit and its date."""
    commits: dict[str, list[str]] = {}
    for run in runs:
        place, at = origin({"machine": run.machine}).split(", commit ")
        if at not in commits.setdefault(place, []):
            commits[place].append(at)
    return "; ".join(
        f"{place}, commit{'s' * (len(ats) > 1)} " + ", ".join(at.replace(", ", " of ") for at in ats)
        for place, ats in commits.items()
    )


def named(peers: Iterable[str], reports: Sequence[Report]) -> str:
    """Peers as they are called, each with the package and version that was timed, where it has one."""

    def name(peer: str) -> str:
        packages = dict.fromkeys(r.options.get("peers", {}).get(peer.partition("-")[0]) for r in reports)
        versions = [package for package in packages if package]
        return attention_results.LABELS.get(peer, peer) + (f" ({', '.join(versions)})" if versions else "")

    return ", ".join(map(name, peers))


def untimed(reports: Sequence[Report], section: str) -> str:
    """The peers that failed in every cell, each with the reason that it gave first; "" when there is none."""
    reasons: dict[str, str | None] = {}
    for record in (record for report in reports for record in report.of_section(section)):
        for peer, result in record.results.items():
            if not peer.startswith(OURS):
                reasons[peer] = None if result.ms is not None else reasons.get(peer, result.reason)
    failed = [f'{named([peer], reports)}: "{reason.splitlines()[0]}"' for peer, reason in reasons.items() if reason]
    return f"; not timed: {', '.join(failed)}" if failed else ""


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def kernels(results: Path) -> str | None:
    """How many times as fast ours is as each peer: the geometric mean of all cells in which that one was timed, and how
    many those are where they are not all."""
    runs = attention_results.runs(results)
    found = {section: attention_results.rows(runs, section) for section in SUMMARY}
    timed = {name for rows in found.values() for row in rows for name in row.ratios}
    peers = [name for name in SUMMARY_PEERS if name in timed]
    lines = []
    for section, what in SUMMARY.items():
        ratios = {peer: [row.ratios[peer] for row in found[section] if peer in row.ratios] for peer in peers}
        if any(ratios.values()):
            cells = len(found[section])
            lines.append([what, str(cells), *(_mean(each, cells) for each in ratios.values())])
    if not lines:
        return None
    reports = [run for run in runs if any(run.of_section(section) for section in SUMMARY)]
    header = ["our speed over that of", "cells", *(attention_results.LABELS[peer] for peer in peers)]
    what = "Geometric means, above 1 where ours is faster, in brackets of how many cells where not of all; bfloat16"
    return f"{what}; peers: {named(peers, reports)}\n({origins(reports)}):\n\n" + table(header, lines)


def _mean(ratios: Sequence[float], cells: int) -> str:
    if not ratios:
        return "-"
    return times(geometric_mean(ratios)) + (f" ({len(ratios)})" if len(ratios) < cells else "")


def forward(results: Path) -> str | None:
    """TFLOP/s of the forward beside the best peer of each cell."""
    return beside_peers(results, "forward", "Forward")


def backward(results: Path) -> str | None:
    """TFLOP/s of the whole backward beside the best peer of each cell."""
    return beside_peers(results, "backward", "Backward, all its kernels")


def beside_peers(results: Path, section: str, what: str) -> str | None:
    reports = attention_results.with_section(attention_results.runs(results), section)
    lines: list[list[str]] = []
    timed: set[str] = set()
    for row in attention_results.rows(reports, section):
        cell, best = row.cell, row.best_peer()
        if cell.seqlen_k not in FORWARD_SEQLENS or cell.heads != cell.kv_heads or best is None:
            continue
        shape = [str(cell.head_dim), cell.mask, str(cell.seqlen_k), f"{cell.batch} x {cell.heads}"]
        peer = f"{attention_results.LABELS.get(best, best)} {row.peer(best):.0f}"
        line = [*shape, f"{row.ours:.0f}", peer, f"{row.ratios[best]:.2f}", times(row.ratios.get("cudnn"))]
        lines.append([*line, f"{row.extra_bytes / 1e6:,.0f}"] if row.extra_bytes is not None else line)
        timed |= row.ratios.keys()
    if not lines:
        return None
    header = ["head_dim", "mask", "length", "batch x heads", "ours", "best peer", "ours / best", "ours / cuDNN"]
    header += ["memory beside its inputs, MB"] * (len(lines[0]) - len(header))
    peers = named((name for name in attention_results.LABELS if name in timed), reports)
    peers += untimed(reports, section)
    return f"{what}, TFLOP/s; peers timed: {peers}\n({origins(reports)}):\n\n" + table(header, lines)


def decode(results: Path) -> str | None:
    """TB/s of keys and values read by a decode step over shuffled pages of 64 tokens."""
    reports = attention_results.with_section(attention_results.runs(results), "decode")
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
    beside = named(peers, reports) + untimed(reports, "decode")
    return f"{what}\ngraphs; peers timed: {beside}\n({origins(reports)}):\n\n" + table(header, lines)


def goals(results: Path) -> str | None:
    """Every goal of the attention kernels that a run measured."""
    runs = attention_results.runs(results)
    reports = [report for report in runs if attention_results.all_goals([report])]
    calls = [first_call.Report.read(path) for path in results.glob("first_call_h200.json")]
    lines = [
        [
            goal.name,
            f"{GOAL_SIGNS[goal.rule]} {goal.goal:g}",
            *([number(goal.values[goal.worst]), number(goal.mean)] if goal.values else ["-", "-"]),
            str(len(goal.values)) + (f", {len(goal.failed)} failed" if goal.failed else ""),
            "yes" if goal.met else "no",
        ]
        for goal in (*attention_results.all_goals(reports), *(goal for run in calls for goal in run.goals()))
    ]
    if not lines:
        return None
    return f"Goals ({origins([*reports, *calls])}):\n\n" + table(
        ["what", "goal", "worst", "mean", "cells", "met"], lines
    )


def fp8(results: Path) -> str | None:
    """TFLOP/s of the forward in 8 bits, beside FlashAttention-3's and ours in 16 bits."""
    reports = attention_results.with_section(attention_results.runs(results), "fp8_forward")
    names = {OURS_KERNEL: "kernel", OURS: "with quantisation", FA3: "FA3, kernel", OURS_BF16: "ours in bf16"}
    lines = []
    for record in reports[0].of_section("fp8_forward") if reports else ():
        cell, ratio = record.cell, record.ratio(OURS_KERNEL, FA3)
        rates = [record.rate(name) for name in names]
        shape = [str(cell.head_dim), cell.mask, str(cell.seqlen_k), f"{cell.batch} x {cell.heads}"]
        lines.append([*shape, *("-" if rate is None else f"{rate:,.0f}" for rate in rates), times(ratio)])
    if not lines:
        return None
    what = f"Forward in 8 bits, TFLOP/s; peer timed: {named([FA3], reports[:1])}"
    header = ["head_dim", "mask", "length", "batch x heads", *names.values(), "kernel / FA3"]
    return f"{what}\n({origins(reports[:1])}):\n\n" + table(header, lines)


def linear(results: Path) -> str:
    """Linear attention's cost over the length; shorter ones are the host's time to launch."""
    facts = load(results / "linear_attention_h200.json")
    rows = []
    for cell in facts["cells"]:
        if cell["head_dim"] == LINEAR_HEAD_DIM and cell["seqlen"] >= LINEAR_FROM:
            softmax, ours = (cell["results"][name]["ms"] for name in ("softmax", "linear"))
            mask = "causal" if cell["causal"] else "full"
            rows.append([mask, f"{cell['seqlen']:,}", f"{softmax:.2f} ms", f"{ours:.2f} ms", f"{softmax / ours:.0f}"])
    what = f"Linear attention beside softmax attention (both ours), 16 heads, head_dim {LINEAR_HEAD_DIM}"
    header = ["mask", "length", "softmax", "linear", "times as fast"]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, rows)


def roofline(results: Path) -> str:
    """FLOPs, bytes, time and memory of every method at one length, without a mask."""
    facts = load(results / "roofline_h200.json")
    rows = []
    for row in facts["rows"]:
        if row["keys"] == ROOFLINE_KEYS and row["mask"] == "full" and row["ms"]:
            bytes_ = f"{row['hbm_bytes'] / 1e6:,.0f}" + ("" if row["hbm_source"] == "counters" else " (counted)")
            rows.append([
                row["title"], f"{row['rows']:,}", f"{row['flops_done'] / 1e9:,.1f}", bytes_,
                f"{row['hbm_bytes'] / row['least_bytes']:.2f}", f"{row['intensity']:,.0f}", f"{row['ms']:.3f}",
                f"{row['tflops']:,.1f}", f"{row['extra_bytes'] / 1e6:,.1f}",
            ])  # fmt: skip
    what = f"{ROOFLINE_KEYS:,} keys, 16 heads, head_dim 128, no mask; least: inputs and outputs once"
    header = ["method", "rows", "GFLOP", "HBM MB", "/ least", "FLOP/B", "ms", "TFLOP/s", "extra MB"]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, rows)


def few_rows(results: Path) -> str:
    """How long the decode kernel takes for rows of a key head beside the Hopper forward, over all problems."""
    facts = load(results / "few_rows_h200.json")
    ratios: dict[int, dict[int, list[float]]] = {}
    for cell in facts["cells"]:
        ratio = cell["ms"]["decode"] / cell["ms"]["forward"]
        ratios.setdefault(cell["rows"], {}).setdefault(cell["head_dim"], []).append(ratio)
    head_dims = sorted({cell["head_dim"] for cell in facts["cells"]})
    rows = [[str(count), *(_spread(found[dim]) for dim in head_dims)] for count, found in sorted(ratios.items())]
    what = "Time of the decode kernel over the forward's, geometric mean and extremes"
    return f"{what}\n({origin(facts)}):\n\n" + table(["rows", *(f"head_dim {dim}" for dim in head_dims)], rows)


def chunks(results: Path) -> str:
    """How fast the forward is at a chunk's rows, and how many times as fast as where blocks load for themselves."""
    facts = load(results / "chunks_h200.json")
    found: dict[int, dict[int, str]] = {}
    for cell in facts["cells"]:
        chosen, alone = cell["ms"]["chosen"], min(cell["ms"][name] for name, (*_, by) in FORMS.items() if by == ALONE)
        speed = f"{cell['flops'] / chosen / 1e9:,.0f} ({times(alone / chosen)})"
        found.setdefault(cell["rows"], {})[cell["keys"] - cell["rows"]] = speed
    contexts = sorted({cell["keys"] - cell["rows"] for cell in facts["cells"]})
    rows = [[f"{count:,}", *(of[context] for context in contexts)] for count, of in sorted(found.items())]
    what = (
        "TFLOP/s of a chunk by its rows and the tokens before it, in brackets over the fastest of four forms whose "
        "blocks load for themselves"
    )
    return f"{what}\n({origin(facts)}):\n\n" + table(["rows", *(f"{context:,}" for context in contexts)], rows)


def beside(results: Path) -> str:
    """How many times as fast a step's attention is with its decodes beside its chunk, by how many blocks they have."""
    facts = load(results / "beside_h200.json")
    counts = [name for name in facts["cells"][0]["ms"] if name != IN_TURN]
    rows = []
    for cell in facts["cells"]:
        ms = cell["ms"]
        step = [f"{cell['rows']:,}", f"{cell['context']:,}", f"{cell['decodes']} x {cell['keys']:,}"]
        rows.append([*step, f"{ms[IN_TURN] * 1e3:,.0f}", *(times(ms[IN_TURN] / ms[count]) for count in counts)])
    what = "Time of a step's attention, one behind the other, over the time with decodes on so many multiprocessors"
    header = ["rows of the chunk", "tokens before it", "decodes", "in turn, us", *counts]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, rows)


def shared_keys(results: Path) -> str:
    """How many times as fast the forward is whose blocks load keys for each other, by what is asked and its keys."""
    facts = load(results / "shared_keys_h200.json")
    found: dict[str, dict[int, str]] = {}
    for cell in facts["cells"]:
        rows = f"the last {cell['rows']:,}" if cell["page"] else "all, causal" if cell["causal"] else "all, no mask"
        name = f"{cell['head_dim']} | {cell['heads']} on {cell['key_heads']} | {rows}"
        found.setdefault(name, {})[cell["keys"]] = times(cell["ms"]["alone"] / cell["ms"]["shared"])
    keys = sorted({cell["keys"] for cell in facts["cells"]})
    lines = [[*name.split(" | "), *(of.get(count, "-") for count in keys)] for name, of in found.items()]
    what = "Time of the forward over that of one whose blocks load keys for each other, under steady load, by the keys"
    header = ["head_dim", "heads", "rows", *(f"{count:,}" for count in keys)]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, lines)


def power(results: Path) -> str:
    """What the power limit makes of kernels under steady load."""
    facts = load(results / "power_h200.json")
    rows = [
        [
            f"{row['section']} {row['cell']['head_dim']} {'causal' if row['cell']['causal'] else 'full'}",
            f"{row['cell']['batch']} x {row['cell']['seqlen_k']:,}",
            row["contender"].replace(f"{OURS}-", "ours, ").replace(OURS, "ours").replace("cudnn", "cuDNN"),
            *(f"{row[name]:,.0f}" for name in ("tflops", "mhz", "watts", "cycles")),
            f"{row['joules']:.2f}",
        ]
        for row in facts["rows"]
    ]
    what = "Speed, clock and power under steady load; cycles of an SM for 10^6 operations, joules for 10^12"
    header = ["what", "tokens", "kernel", "TFLOP/s", "MHz", "W", "cycles", "J"]
    return f"{what}\n({origin(facts)}):\n\n" + table(header, rows)


def _spread(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
