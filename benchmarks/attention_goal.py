"""What a goal of the attention benchmark is: values of some cells and what they must reach. Knows no device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.attention_registry import OURS
from benchmarks.attention_report import Record


class Rule(StrEnum):
    """What of the values must reach the goal."""

    EACH = "each at least"
    MEAN = "geometric mean at least"
    AT_MOST = "each at most"


@dataclass(frozen=True)
class Goal:
    name: str
    goal: float
    values: Sequence[float]  # one per cell; empty when no cell was timed
    cells: Sequence[str] = ()  # what each value is of
    rule: Rule = Rule.EACH
    over_best: bool = False  # whether the values are ratios over each cell's best peer
    failed: Sequence[str] = ()  # cells in which ours was wrong or raised: none of them meets anything

    @property
    def worst(self) -> int:
        """The place of the worst value."""
        pick = max if self.rule is Rule.AT_MOST else min
        return pick(range(len(self.values)), key=lambda i: self.values[i])

    @property
    def mean(self) -> float:
        return math.exp(sum(map(math.log, self.values)) / len(self.values))

    @property
    def met(self) -> bool | None:
        if self.failed:
            return False
        if not self.values:
            return None
        if self.rule is Rule.MEAN:
            return self.mean >= self.goal
        worst = self.values[self.worst]
        return worst <= self.goal if self.rule is Rule.AT_MOST else worst >= self.goal

    def __str__(self) -> str:
        failed = f"; ours failed: {', '.join(self.failed)}" if self.failed else ""
        if not self.values:
            return f"{self.name}: not measured ({self.rule} {self.goal:g}){failed}"
        where = f" ({self.cells[self.worst]})" if self.cells else ""
        count = f", {sum(self._passes(x) for x in self.values)} of {len(self.values)} cells pass"
        verdict = "met" if self.met else "MISSED"
        numbers = f"worst {number(self.values[self.worst])}{where}, mean {number(self.mean)}{count}"
        return f"{verdict:6} {self.name}, {self.rule} {self.goal:g}: {numbers}{failed}"

    def _passes(self, value: float) -> bool:
        return value <= self.goal if self.rule is Rule.AT_MOST else value >= self.goal

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "goal": self.goal,
            "rule": str(self.rule),
            "values": list(self.values),
            "cells": list(self.cells),
            "failed": list(self.failed),
            "met": self.met,
        }


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}"


def of_cells(
    records: Sequence[Record],
    section: str,
    name: str,
    goal: float,
    value: Callable[[Record], float | None],
    rule: Rule = Rule.EACH,
    where: Callable[[Record], bool] = lambda _: True,
) -> Goal:
    """A goal over the cells of a section that `where` picks and that have a value, or have none as ours failed."""
    values, cells, failed = [], [], []
    for record in records:
        if record.cell.section != section or not where(record):
            continue
        if (x := value(record)) is not None:
            values.append(x)
            cells.append(str(record.cell))
        elif record.ours_failed:
            failed.append(str(record.cell))
    return Goal(name, goal, values, cells, rule, value is over_best, failed)


def over(peer: str) -> Callable[[Record], float | None]:
    return lambda record: record.ratio(OURS, peer)


def over_best(record: Record) -> float | None:
    best = record.best_peer()
    return record.ratio(OURS, best) if best else None


def is_16k(head_dim: int, causal: bool) -> Callable[[Record], bool]:
    wanted = (head_dim, causal, 16384)
    return lambda r: (r.cell.head_dim, r.cell.causal, r.cell.seqlen_q) == wanted and not grouped(r)


def grouped(record: Record) -> bool:
    return record.cell.heads != record.cell.kv_heads
