"""The measured table of how servers fail, from the results of benchmarks/faults.py."""

import textwrap
from pathlib import Path

from benchmarks.fault_outcomes import Outcome
from benchmarks.markdown import Facts, load, short, table

LINE = 120
WORST = (Outcome.GONE, Outcome.HANG, Outcome.SERVER_ERROR, Outcome.WRONG)  # first what is worst
#: Of the results, as a reader knows them.
NAMES = {
    "longwave": "ours",
    "transformers": "transformers serve",
    "transformers_batching": "the same, continuous batching",
}


def faults(results: Path) -> str:
    """A line for each server, and in words which faults went wrong."""
    facts = load(results / "faults_cpu.json")
    m = facts["machine"]
    rows = []
    for name, run in facts["servers"].items():
        found = run["counts"]
        rows.append(
            [
                NAMES.get(name, name),
                str(found["faults"]),
                str(found[Outcome.RIGHT]),
                f"{found['in_openai_shape']} of {found['requests']}",
                *(str(found[outcome]) for outcome in reversed(WORST)),
            ]
        )
    header = ["server", "faults", "refused or right", "in OpenAI's shape"]
    text = (
        "The same faults over HTTP (nonsense in the JSON and in its fields, clients that leave or\n"
        "stall, SIGTERM), each server with its defaults and the bundled model. A refusal with 422 is right, but not\n"
        f"in OpenAI's shape (transformers {m['transformers']}, OMP threads: {m['threads']}, {m['cores']} cores of an\n"
        f"{m['cpu']}, commit {short(m['commit'])}, {m['date'][:10]}):\n\n"
    )
    said = "\n".join(
        textwrap.fill(f"- {NAMES.get(name, name)}: {worst(run)}.", LINE, subsequent_indent="  ")
        for name, run in facts["servers"].items()
    )
    return f"{text}{table([*header, *map(str, reversed(WORST))], rows)}\n\nWhat went wrong, the worst first:\n\n{said}"


def worst(run: Facts) -> str:
    """Which faults were not right, by outcome; where all were, which request's reply was the slowest."""
    wrong = [
        f"{outcome} ({len(named)}): {', '.join(named)}"
        for outcome in WORST
        if (named := [row["fault"] for row in run["faults"] if row["outcome"] == outcome])
    ]
    if wrong:
        return "; ".join(wrong)
    slowest = max((row for row in run["faults"] if row["in_openai_shape"] is not None), key=lambda row: row["ms"])
    return f"nothing; the slowest reply to a request, {slowest['ms']:.0f} ms, was that to {slowest['fault']}"
