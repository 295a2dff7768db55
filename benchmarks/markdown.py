"""A table in Markdown, and the words for where its numbers are from. Knows no result file's contents but `machine`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def load(file: Path) -> Facts:
    facts: Facts = json.loads(file.read_text())
    return facts


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(commit: str) -> str:
    """Ten digits of the hash, and whatever mark `machine.git_commit` put behind it."""
    digits, space, mark = commit.partition(" ")
    return f"{digits[:10]}{space}{mark}"


def origin(facts: Facts, commit: str | None = None) -> str:
    """`commit`: in these words, where not all of the file is of one."""
    m = facts["machine"]
    at = commit or f"commit {short(m['commit'])}, {m['date'][:10]}"
    return f"{m['gpu']}, driver {m['driver']}, torch {m['torch']}, CuPy {m['cupy']}, {at}"
