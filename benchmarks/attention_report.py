"""What the attention benchmark says: one record per cell, the table, the goals, the JSON file. Knows no device."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attention_cells import Cell

FORWARD_GOAL, DECODE_GOAL = 0.95, 0.85
_GOAL_SEQLENS = range(2048, 16384 + 1)
_GOAL_DECODES = ((8, 32768), (16, 131072))


@dataclass(frozen=True)
class Result:
    """Of one contender in one cell: a time, or the reason why there is none."""

    ms: float | None
    reason: str | None = None
    error: float | None = None  # relative, against torch SDPA


@dataclass(frozen=True)
class Record:
    cell: Cell
    results: Mapping[str, Result]

    def speed(self, name: str) -> float | None:
        """TFLOP/s, for decode TB/s of KV read."""
        result = self.results.get(name)
        if result is None or result.ms is None:
            return None
        work = self.cell.kv_bytes if self.cell.section == "decode" else self.cell.flops
        return work / result.ms / 1e9

    def ratio(self, name: str, peer: str) -> float | None:
        ours, theirs = self.speed(name), self.speed(peer)
        return ours / theirs if ours and theirs else None

    def facts(self) -> dict[str, Any]:
        unit = "tb_per_s" if self.cell.section == "decode" else "tflops"
        results = {
            name: {"ms": r.ms, unit: self.speed(name), "relative_error": r.error, "reason": r.reason}
            for name, r in self.results.items()
        }
        return self.cell.facts() | {"flops": self.cell.flops, "kv_bytes": self.cell.kv_bytes, "results": results}


@dataclass(frozen=True)
class Goal:
    name: str
    goal: float
    values: Sequence[float]  # one per cell; empty when no cell was timed

    @property
    def met(self) -> bool | None:
        return min(self.values) >= self.goal if self.values else None

    def __str__(self) -> str:
        if not self.values:
            return f"{self.name}: not measured (goal {self.goal:.2f})"
        mean = math.exp(sum(map(math.log, self.values)) / len(self.values))
        verdict = "met" if self.met else "MISSED"
        return f"{self.name}: worst {min(self.values):.3f}, mean {mean:.3f} (goal {self.goal:.2f} in each: {verdict})"


@dataclass
class Report:
    """Grows cell by cell; the file is whole after every cell."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    ours: str
    generic: str
    fa2: str
    copy_tb_per_s: float | None = None
    records: list[Record] = field(default_factory=list)

    def goals(self) -> list[Goal]:
        goals = [self._forward_goal(dim, causal) for dim in (64, 128) for causal in (True, False)]
        return goals + [self._decode_goal(batch, context) for batch, context in _GOAL_DECODES]

    def _forward_goal(self, head_dim: int, causal: bool) -> Goal:
        ratios = [
            r.ratio(self.generic, self.fa2)
            for r in self.records
            if r.cell.section == "forward" and r.cell.head_dim == head_dim and r.cell.causal == causal
            if r.cell.seqlen_q in _GOAL_SEQLENS and r.cell.heads == r.cell.kv_heads
        ]
        name = f"generic forward / FA2, d={head_dim} {'causal' if causal else 'full'}, 2k to 16k"
        return Goal(name, FORWARD_GOAL, [x for x in ratios if x is not None])

    def _decode_goal(self, batch: int, context: int) -> Goal:
        speeds = [
            r.speed(self.ours)
            for r in self.records
            if r.cell.section == "decode" and (r.cell.batch, r.cell.seqlen_k, r.cell.head_dim) == (batch, context, 128)
        ]
        shares = [x / self.copy_tb_per_s for x in speeds if x is not None and self.copy_tb_per_s]
        return Goal(f"decode {batch} x {context}, share of copy bandwidth", DECODE_GOAL, shares)

    def write(self, path: Path) -> None:
        content = {
            "machine": dict(self.machine),
            "options": dict(self.options),
            "copy_tb_per_s": self.copy_tb_per_s,
            "goals": [{"name": g.name, "goal": g.goal, "values": list(g.values), "met": g.met} for g in self.goals()],
            "cells": [r.facts() for r in self.records],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def table(self, section: str) -> str:
        records = [r for r in self.records if r.cell.section == section]
        names = list(dict.fromkeys(name for r in records for name in r.results))
        peers = [name for name in names if name != self.ours]
        unit = "TB/s of KV read" if section == "decode" else "TFLOP/s"
        share = ["of copy"] if section == "decode" else []
        head = ["d", "mask", "q", "keys", "batch", "heads", *names, *share, *(f"/{p}" for p in peers)]
        rows = [[*self._shape(r.cell), *self._numbers(r, names, peers)] for r in records]
        return f"{section}, {unit}; the last columns are {self.ours} over the peer\n{plain_table(head, rows)}"

    def _shape(self, cell: Cell) -> list[str]:
        heads = f"{cell.heads}/{cell.kv_heads}" if cell.heads != cell.kv_heads else str(cell.heads)
        return [str(cell.head_dim), cell.mask, str(cell.seqlen_q), str(cell.seqlen_k), str(cell.batch), heads]

    def _numbers(self, record: Record, names: Sequence[str], peers: Sequence[str]) -> list[str]:
        digits = 3 if record.cell.section == "decode" else 1
        numbers = [_number(record.speed(name), digits) for name in names]
        if record.cell.section == "decode":
            speed = record.speed(self.ours)
            numbers.append(_number(speed / self.copy_tb_per_s if speed and self.copy_tb_per_s else None, 2))
        return numbers + [_number(record.ratio(self.ours, peer), 2) for peer in peers]

    def missing(self) -> list[str]:
        """One line per contender and reason, with how many cells it cost."""
        reasons: dict[tuple[str, str], int] = {}
        for record in self.records:
            for name, result in record.results.items():
                if result.ms is None:
                    key = (f"{record.cell.section} {name}", result.reason or "no reason given")
                    reasons[key] = reasons.get(key, 0) + 1
        return [f"{name}: {count} cells not timed: {reason}" for (name, reason), count in reasons.items()]


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in (head, *rows))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
