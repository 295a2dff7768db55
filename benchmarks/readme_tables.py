"""Writes the measured tables of the README and of pages in docs from the files in benchmarks/results, between their
markers.

    python benchmarks/readme_tables.py            rewrites the pages
    python benchmarks/readme_tables.py --check    exit code 1 when one of them says something else

Exit code 2: another argument; nothing was written.

Knows the result files' names and no device.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks import attention_feature_tables, attention_tables, cpu_tables, engine_tables, fault_tables, trial_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))

TABLES: dict[str, Callable[[Path], str | None]] = {
    "kernels": attention_tables.kernels,
    "forward": attention_tables.forward,
    "backward": attention_tables.backward,
    "decode": attention_tables.decode,
    "goals": attention_tables.goals,
    "fp8": attention_tables.fp8,
    "shapes": attention_feature_tables.shapes,
    "features": attention_feature_tables.features,
    "contexts": attention_feature_tables.contexts,
    "lengths": attention_feature_tables.lengths,
    "patterns": attention_feature_tables.patterns,
    "linear": attention_tables.linear,
    "roofline": attention_tables.roofline,
    "few_rows": attention_tables.few_rows,
    "chunks": attention_tables.chunks,
    "beside": attention_tables.beside,
    "shared_keys": attention_tables.shared_keys,
    "power": attention_tables.power,
    "serving": engine_tables.serving,
    "longcontext": engine_tables.longcontext,
    "training": engine_tables.training,
    "cpu": cpu_tables.cpu,
    "serving_cpu": cpu_tables.serving_cpu,
    "faults": fault_tables.faults,
    "trials": trial_tables.trials,
}


def rewritten(page: str) -> str:
    """With every table between its markers; one whose markers are not there, or that has no results, is left out."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if bool(found) != bool(closed):
            raise SystemExit(f"a page has no whole {begin.strip()} ... {end.strip()}")
        text = make(RESULTS) if found else None
        if text is not None:
            page = f"{before}{begin}{text}\n{end}{after}"
    return page


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    texts = {page: page.read_text() for page in PAGES}
    wanted = {page: rewritten(text) for page, text in texts.items()}
    if arguments:
        return int(wanted != texts)
    for page, text in wanted.items():
        if text != texts[page]:
            page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
