"""Measured runs of the attention benchmark, put together: several files, each with ours and some of the peers.

Speeds of different runs are never compared: a peer stands beside ours of its own run. Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.attention_cells import Cell
from benchmarks.attention_goal import Goal
from benchmarks.attention_goals import goals
from benchmarks.attention_registry import OURS, OURS_DENSE
from benchmarks.attention_report import Report

RESULTS = Path(__file__).resolve().parent / "results"

#: Contenders as they are called in text and plots.
LABELS = {
    OURS: "ours",
    "cudnn": "cuDNN",
    "fa2": "FA2 (torch)",
    "fa3": "FA3",
    "fa4": "FA4",
    "flashinfer": "FlashInfer",
    "flashinfer-cascade": "FlashInfer cascade",
    "flex": "FlexAttention",
    "mem-eff": "memory-efficient",
}


@dataclass(frozen=True)
class Row:
    """A cell with ours of the first run that has it, and every peer relative to ours of the peer's run."""

    cell: Cell
    ours: float  # in the section's unit
    share_of_copy: float | None
    ratios: dict[str, float]  # ours / peer, of the newest run that timed both
    extra_bytes: int | None = None  # of ours, where memory was measured
    dense: float | None = None  # ours' time over that of its dense twin, where that was timed

    def peer(self, name: str) -> float | None:
        """The peer's speed, had ours been in its run what it is in this row."""
        return self.ours / self.ratios[name] if name in self.ratios else None

    def best_peer(self) -> str | None:
        return min(self.ratios, key=lambda name: self.ratios[name], default=None)


def runs(folder: Path = RESULTS) -> list[Report]:
    """The newest first: what it says of ours, others are compared with."""
    reports = [Report.read(path) for path in sorted(folder.glob("attention_*.json"))]
    return sorted(reports, key=lambda report: str(report.machine["date"]), reverse=True)


def with_section(reports: Sequence[Report], section: str) -> list[Report]:
    return [report for report in reports if report.of_section(section)]


def rows(reports: Sequence[Report], section: str) -> list[Row]:
    """Of the cells that ours was timed in, in the order of the run with the most of them. One in which ours failed in
    the newest run that has it is none of them."""
    largest = max(reports, key=lambda report: len(report.of_section(section)), default=None)
    places = {} if largest is None else {record.cell: i for i, record in enumerate(largest.of_section(section))}
    found: dict[Cell, Row] = {}
    failed: set[Cell] = set()
    for report in reports:
        for record in report.of_section(section):
            if record.ours_failed and record.cell not in found:
                failed.add(record.cell)
            ours = record.number(OURS)
            if ours is None or record.cell in failed:
                continue
            extra, dense = record.results[OURS].extra_bytes, record.times_as_fast(OURS_DENSE, OURS)
            row = found.setdefault(record.cell, Row(record.cell, ours, _share(ours, report), {}, extra, dense))
            for name in record.peers():
                ratio = record.ratio(OURS, name)
                if ratio is not None:
                    row.ratios.setdefault(name, ratio)
    return sorted(found.values(), key=lambda row: places.get(row.cell, len(places)))


def _share(ours: float, report: Report) -> float | None:
    return ours / report.copy_tb_per_s if report.copy_tb_per_s else None


def all_goals(reports: Sequence[Report]) -> list[Goal]:
    """The goals that anything was measured for, over all runs together: each cell as in the newest that has it, and its
    best peer of all runs, each peer as in the newest that has both."""
    sections = {record.cell.section for report in reports for record in report.records}
    found = [row for section in sections for row in rows(reports, section)]
    best = {str(row.cell): min(row.ratios.values()) for row in found if row.ratios}
    together: dict[str, Goal] = {}
    for report in reports:
        for goal in goals(report.records, report.copy_tb_per_s):
            if not goal.values and not goal.failed:
                continue
            known = together.get(goal.name)
            if known is None:
                together[goal.name] = goal
            else:
                seen = {*known.cells, *known.failed}
                new = [(v, c) for v, c in zip(goal.values, goal.cells, strict=True) if c not in seen]
                values, cells = [*known.values, *(v for v, _ in new)], [*known.cells, *(c for _, c in new)]
                failed = [*known.failed, *(c for c in goal.failed if c not in seen)]
                together[goal.name] = replace(known, values=values, cells=cells, failed=failed)
    return [
        replace(goal, values=[best[cell] for cell in goal.cells]) if goal.over_best else goal
        for goal in together.values()
    ]
