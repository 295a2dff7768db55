"""What the attention benchmark says: one record per cell, the tables, the JSON file. Knows no device."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attention_cells import Cell
from benchmarks.attention_registry import OURS

#: What a section's numbers are, by their name in the file; TFLOP/s where nothing is said.
_UNITS = {
    "decode": ("tb_per_s", "TB/s of KV read", 3),
    "latency": ("us", "microseconds a call", 2),
    "shared_prefix": ("us", "microseconds a step", 1),
    "fp8_kv": ("us", "microseconds a step", 1),
    "fp8_error": ("relative_rmse", "error over the truth's size", 4),
}
#: Sections whose calls' memory is measured.
MEASURED = ("backward",)
#: Sections whose ratios are of times, as their dense twins have more to compute.
_TIMES = ("block_sparse", "features", "patterns")
_TFLOPS = ("tflops", "TFLOP/s", 1)


def unit(section: str) -> tuple[str, str, int]:
    """The name in the file, in words, and the decimals."""
    return _UNITS.get(section, _TFLOPS)


@dataclass(frozen=True)
class Result:
    """Of one contender in one cell: a time, or the reason why there is none."""

    ms: float | None
    reason: str | None = None
    error: float | None = None  # relative, against the float32 truth
    twin: Cell | None = None  # what it ran, when that is not the cell
    extra_bytes: int | None = None  # allocated at its peak beyond what there was before, where that is measured


@dataclass(frozen=True)
class Record:
    cell: Cell
    results: Mapping[str, Result]

    def ms(self, name: str) -> float | None:
        result = self.results.get(name)
        return result.ms if result else None

    def rate(self, name: str) -> float | None:
        """TFLOP/s of what the contender ran."""
        result = self.results.get(name)
        if result is None or result.ms is None:
            return None
        return (result.twin or self.cell).flops / result.ms / 1e9

    def number(self, name: str) -> float | None:
        """In the section's unit."""
        ms, kind = self.ms(name), unit(self.cell.section)[0]
        if ms is None:
            return None
        if kind == "us":
            return ms * 1e3
        if kind == "tb_per_s":
            return self.cell.kv_bytes / ms / 1e9
        return self.results[name].error if kind == "relative_rmse" else self.rate(name)

    def ratio(self, name: str, peer: str) -> float | None:
        """How many times the peer's TFLOP/s; on the same cell that is how many times as fast."""
        ours, theirs = self.rate(name), self.rate(peer)
        return ours / theirs if ours and theirs else None

    def times_as_fast(self, name: str, peer: str) -> float | None:
        """The peer's time over ours, whatever each ran."""
        ours, theirs = self.ms(name), self.ms(peer)
        return theirs / ours if ours and theirs else None

    @property
    def ours_failed(self) -> bool:
        """Whether ours was to be timed and was wrong, or raised."""
        return OURS in self.results and self.results[OURS].ms is None

    def peers(self) -> list[str]:
        """The contenders that are not ours and were timed."""
        return [name for name, r in self.results.items() if r.ms is not None and not name.startswith(OURS)]

    def best_peer(self) -> str | None:
        return min(self.peers(), key=lambda name: self.ms(name) or 0.0, default=None)

    def facts(self) -> dict[str, Any]:
        key = unit(self.cell.section)[0]
        results = {
            name: {"ms": r.ms, key: self.number(name), "relative_error": r.error, "reason": r.reason}
            | ({"twin": r.twin.facts()} if r.twin else {})
            | ({"extra_bytes": r.extra_bytes} if r.extra_bytes is not None else {})
            for name, r in self.results.items()
        }
        return self.cell.facts() | {"flops": self.cell.flops, "kv_bytes": self.cell.kv_bytes, "results": results}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Record":
        results = {
            name: Result(
                r["ms"],
                r["reason"],
                r["relative_error"],
                Cell.of(r["twin"]) if "twin" in r else None,
                r.get("extra_bytes"),
            )
            for name, r in facts["results"].items()
        }
        return cls(Cell.of(dict(facts)), results)


@dataclass
class Report:
    """Grows cell by cell; the file is whole after every cell."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    copy_tb_per_s: float | None = None
    records: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Report":
        content = json.loads(path.read_text())
        records = [Record.of(facts) for facts in content["cells"]]
        return cls(content["machine"], content["options"], content["copy_tb_per_s"], records)

    def write(self, path: Path, goals: Sequence[Mapping[str, Any]] = ()) -> None:
        content = {
            "machine": dict(self.machine),
            "options": dict(self.options),
            "copy_tb_per_s": self.copy_tb_per_s,
            "goals": [dict(goal) for goal in goals],
            "cells": [r.facts() for r in self.records],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def of_section(self, section: str) -> list[Record]:
        return [r for r in self.records if r.cell.section == section]

    def table(self, section: str) -> str:
        records = self.of_section(section)
        names = list(dict.fromkeys(name for r in records for name in r.results))
        others = [name for name in names if name != OURS]
        share = ["of copy"] if section == "decode" else []
        memory = [f"{name} MiB" for name in names] if section in MEASURED else []
        head = ["d", "mask", "q", "keys", "batch", "heads", "", *names, *share, *(f"/{p}" for p in others), *memory]
        rows = [[*_shape(r.cell), *self._numbers(r, names, others)] for r in records]
        what = "how many times as fast" if unit(section)[0] == "us" or section in _TIMES else "over the others"
        return f"{section}, {unit(section)[1]}; the last columns are {OURS}, {what}\n{plain_table(head, rows)}"

    def _numbers(self, record: Record, names: Sequence[str], others: Sequence[str]) -> list[str]:
        digits = unit(record.cell.section)[2]
        numbers = [_text(record.number(name), digits) for name in names]
        if record.cell.section == "decode":
            speed = record.number(OURS)
            numbers.append(_text(speed / self.copy_tb_per_s if speed and self.copy_tb_per_s else None, 2))
        compare = record.times_as_fast if record.cell.section in _TIMES else record.ratio
        numbers += [_text(compare(OURS, name), 2) for name in others]
        if record.cell.section in MEASURED:
            extra = (r.extra_bytes if (r := record.results.get(name)) else None for name in names)
            numbers += [_text(None if x is None else x / 2**20, 0) for x in extra]
        return numbers

    def missing(self) -> list[str]:
        """One line per contender and reason, with how many cells it cost."""
        reasons: dict[tuple[str, str], int] = {}
        for record in self.records:
            for name, result in record.results.items():
                if result.ms is None:
                    key = (f"{record.cell.section} {name}", result.reason or "no reason given")
                    reasons[key] = reasons.get(key, 0) + 1
        return [f"{name}: {count} cells not timed: {reason}" for (name, reason), count in reasons.items()]


def _shape(cell: Cell) -> list[str]:
    heads = f"{cell.heads}/{cell.kv_heads}" if cell.heads != cell.kv_heads else str(cell.heads)
    extras = {
        "page": cell.page,
        "density": cell.density if cell.density < 1 else 0,
        "dropout": cell.dropout,
        "calls": cell.calls - 1 and cell.calls,
    }
    words = [cell.options, cell.dtype if cell.dtype != "bfloat16" else ""]
    extra = ", ".join(filter(None, [*(f"{name} {value:g}" for name, value in extras.items() if value), *words]))
    return [str(cell.head_dim), cell.mask, str(cell.seqlen_q), str(cell.seqlen_k), str(cell.batch), heads, extra]


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in (head, *rows))


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
