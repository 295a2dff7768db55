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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"

FORWARD_SEQLENS = (1024, 4096, 16384)
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


def speed(result: Facts | None, unit: str, digits: int) -> str:
    if result is None or result["ms"] is None:
        return "-"
    return f"{result[unit]:.{digits}f}"


def ratio(results: Facts, ours: str, peer: str) -> str:
    times = [results.get(name, {}).get("ms") for name in (peer, ours)]
    return f"{times[0] / times[1]:.2f}" if all(times) else "-"


def forward() -> str:
    """TFLOP/s of the forward, of what dispatch chooses on this GPU and of the generic kernel, beside torch's."""
    facts = load("attention_forward_h200.json")
    rows = []
    for cell in facts["cells"]:
        if cell["seqlen_k"] not in FORWARD_SEQLENS or cell["heads"] != cell["kv_heads"]:
            continue
        r = cell["results"]
        numbers = [speed(r.get(name), "tflops", 0) for name in ("longwave", "cudnn", "longwave-generic", "fa2")]
        shape = [str(cell["head_dim"]), "causal" if cell["causal"] else "full", str(cell["seqlen_k"])]
        ratios = [ratio(r, "longwave", "cudnn"), ratio(r, "longwave-generic", "fa2")]
        rows.append([*shape, *numbers, *ratios])
    header = ["head_dim", "mask", "length", "ours", "cuDNN", "our generic kernel", "FA2 (torch)", "ours / cuDNN"]
    return f"Forward, TFLOP/s ({origin(facts)}):\n\n" + table([*header, "generic / FA2"], rows)


def decode() -> str:
    """TB/s of keys and values read by a decode step over shuffled pages of 64 tokens."""
    facts = load("attention_decode_h200.json")
    rows = []
    for cell in facts["cells"]:
        r = cell["results"]
        share = r["longwave"]["tb_per_s"] / facts["copy_tb_per_s"]
        numbers = [speed(r.get(name), "tb_per_s", 2) for name in ("longwave", "cudnn", "fa2")]
        rows.append([str(cell["batch"]), str(cell["seqlen_k"]), *numbers, f"{100 * share:.0f} %"])
    header = ["batch", "context", "ours, over pages", "cuDNN, contiguous", "FA2 (torch), contiguous", "ours / copy"]
    what = (
        "Decode, one query row, 32 query heads over 8 key heads, head_dim 128, TB/s of keys and values read, from CUDA"
    )
    return f"{what}\ngraphs ({origin(facts)}):\n\n" + table(header, rows)


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


def cpu() -> str:
    """The quick start: the bundled model on two cores, beside transformers' generate."""
    facts = load("cpu_decode.json")
    m, speeds = facts["machine"], facts["tokens_per_s"]
    rows = [
        [name, f"{speeds[key]['ours']:.1f}", f"{speeds[key]['transformers']:.1f}"]
        for name, key in (("one", "one_request"), ("eight at once", "8_requests"))
    ]
    alone = speeds["8_requests"]["ours_over_transformers_alone"]
    text = (
        f"The bundled model on {m['cores']} cores of an {m['cpu']}, float32, tokens per second, beside transformers'\n"
        "own generate with eager attention, same greedy tokens\n"
        f"(torch {m['torch']}, transformers {m['transformers']}, commit {m['commit'][:10]}, {m['date'][:10]};\n"
        f"eight at once give {alone:.1f} times what generate gives one):\n\n"
    )
    return text + table(["requests", "ours", "transformers"], rows)


TABLES: dict[str, Callable[[], str]] = {"forward": forward, "decode": decode, "longcontext": longcontext, "cpu": cpu}


def rewritten(readme: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"README.md has no {begin.strip()} ... {end.strip()}")
        readme = f"{before}{begin}{make()}\n{end}{after}"
    return readme


def main() -> None:
    text = README.read_text()
    wanted = rewritten(text)
    if "--check" in sys.argv[1:]:
        sys.exit(int(wanted != text))
    README.write_text(wanted)


if __name__ == "__main__":
    main()
