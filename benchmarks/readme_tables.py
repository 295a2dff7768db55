"""Writes the README's measured tables from the files in benchmarks/results, between their markers.

    python benchmarks/readme_tables.py            rewrites README.md
    python benchmarks/readme_tables.py --check    exit code 1 when README.md says something else

Knows the result files' names and no device.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import attention_tables, cpu_tables, engine_tables, fault_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"

TABLES: dict[str, Callable[[Path], str | None]] = {
    "forward": attention_tables.forward,
    "backward": attention_tables.backward,
    "decode": attention_tables.decode,
    "goals": attention_tables.goals,
    "linear": attention_tables.linear,
    "serving": engine_tables.serving,
    "longcontext": engine_tables.longcontext,
    "training": engine_tables.training,
    "cpu": cpu_tables.cpu,
    "serving_cpu": cpu_tables.serving_cpu,
    "faults": fault_tables.faults,
}


def rewritten(readme: str) -> str:
    """With every table between its markers; one whose markers are not there, or that has no results, is left out."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if bool(found) != bool(closed):
            raise SystemExit(f"README.md has no whole {begin.strip()} ... {end.strip()}")
        text = make(RESULTS) if found else None
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
