"""A trial of a server: minutes of one kind of trouble, and what is measured of it beside the design's goals. Runs
nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench import metrics

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number. `goal` None: there is none, and a reader may like to know it all the same."""

    name: str
    value: float
    goal: float | None = None
    at_least: bool = False  # else at most

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def row(self) -> Row:
        sign = ">=" if self.at_least else "<="
        goal = None if self.goal is None else f"{sign} {self.goal:g}"
        return {"measure": self.name, "value": round(self.value, 3), "goal": goal, "met": self.met}


@dataclass(frozen=True, slots=True)
class Scale:
    """How long and how much: the recorded run's, or less to try a script."""

    model: str = "little"  # trial_server.LITTLE
    seconds: float = 60.0  # of an overload
    soak_seconds: float = 600.0
    chaos_seconds: float = 600.0
    disconnects: int = 1000
    kills: int = 20
    drains: int = 10
    clients: int = 64  # that retry, at most
    raw_requests: int = 100_000
    stalled: int = 500  # readers
    slow: int = 1000  # connections
    prompts: int = 64  # that are answered alone and among others
    prompts_at_once: int = 100  # as long as they may be
    pairs: int = 500  # of prompts that another key had sent or not


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    design: str  # what is done, in words for a table
    run: Callable[[Scale], list[Measure]]


def percentile(values: Sequence[float], percent: float) -> float:
    """As `longwave bench` has it, and of values in any order; 0 of none."""
    return metrics.percentile(sorted(values), percent) if values else 0.0
